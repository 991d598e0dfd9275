"""Nets outside training: scoring, timing, feature extraction, and checks before a job starts."""
