"""What every package may use: files, text, messages and the environment."""
