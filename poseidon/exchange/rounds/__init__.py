"""Local steps: exchanges of rounds of iterations, whole, in fragments, and asynchronous."""
