"""A testbed for measurements: hosts as namespaces on one machine, and jobs on them
(`benchmarks/cluster.py`).
"""
