"""Sufficient factors: the gradient of a fully-connected weight as two thin matrices, broadcast
to all workers.
"""
