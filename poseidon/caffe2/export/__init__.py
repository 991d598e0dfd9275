"""Caffe2 nets in other formats."""
