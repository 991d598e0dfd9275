"""Poseidon: distributed deep learning for clusters on ordinary Ethernet."""

__version__ = "0.1.0"

__all__ = ["__version__"]
