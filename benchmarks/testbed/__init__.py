"""Hosts on one machine for measurements, and what runs on them; `benchmarks/cluster.py` is the command."""
