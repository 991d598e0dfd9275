"""Builders of whole networks."""
