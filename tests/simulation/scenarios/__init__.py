"""What is simulated: each scenario is a function of a world."""
