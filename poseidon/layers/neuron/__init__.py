"""Layers that work element by element, and those that normalize."""
