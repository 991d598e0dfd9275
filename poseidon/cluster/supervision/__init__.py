"""Supervision of a running job: a state machine, the loop around it, and restarts."""
