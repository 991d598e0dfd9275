"""The workers of one host: they add their gradients in shared memory, and each exchanges a part of
the tensors with other hosts.
"""
