"""Losses, scores, and layers that consume blobs."""
