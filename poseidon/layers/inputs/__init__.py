"""Layers that bring data into a net."""
