"""The parts of a solver that are not the update rule: rate policies, and what the definition asks for."""
