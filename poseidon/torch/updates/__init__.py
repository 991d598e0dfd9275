"""What applies gradients to a module's parameters: one of four."""
