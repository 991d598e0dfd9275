"""Learning rates and the update rules of optimizers."""
