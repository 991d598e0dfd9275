"""The version of Poseidon."""

__version__ = "0.1.0"
