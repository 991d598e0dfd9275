"""Layers that combine, reshape and multiply blobs."""
