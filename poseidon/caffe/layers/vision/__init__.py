"""Layers over the height and width of an image."""
