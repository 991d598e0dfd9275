"""Batches for data layers: which records in which order, transformed ahead of their use."""
