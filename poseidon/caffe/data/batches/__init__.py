"""Batches for data layers: which records, in which order, decoded and transformed, made ahead of
their use.
"""
