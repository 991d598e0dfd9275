"""Sparse rows, segments and lengths."""
