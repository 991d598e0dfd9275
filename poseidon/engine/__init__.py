"""The training loop and what belongs to it: one worker's process, test passes, checkpoints."""
