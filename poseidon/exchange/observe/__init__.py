"""Observers of an exchange: waits, traffic, traces, and the watchdog."""
