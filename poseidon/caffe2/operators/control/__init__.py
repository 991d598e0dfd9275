"""Operators that run nets: conditions, loops, recurrent networks."""
