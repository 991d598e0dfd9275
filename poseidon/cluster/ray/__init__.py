"""Clients of a job on the nodes of a Ray cluster: placement, and a connection to an actor on
each node.
"""
