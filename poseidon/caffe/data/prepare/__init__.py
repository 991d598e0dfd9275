"""Preparation of data sets: download, conversion, and division among clients."""
