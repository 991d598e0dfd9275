"""What the launcher asks of a job of a net: training, extraction, and its data."""
