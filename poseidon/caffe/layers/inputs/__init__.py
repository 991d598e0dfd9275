"""Layers that feed data to a net, and HDF5Output."""
