"""Fault injection: jobs with a fault at a random moment, and their outcomes."""
