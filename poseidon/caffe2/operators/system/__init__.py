"""Databases, counters, strings, and operators written in Python."""
