"""Layers of SSD's branch that read and write boxes (Liu et al., 2016)."""
