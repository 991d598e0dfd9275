"""Arithmetic, comparisons, functions of each value, matrix products and reductions."""
