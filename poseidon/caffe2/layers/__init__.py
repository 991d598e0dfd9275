"""Layers of a `LayerModelHelper`: parts of a model from which several nets are made."""
