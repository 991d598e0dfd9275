"""The workers of one host: they sum their gradients in shared memory, and one of them exchanges
with other hosts.
"""
