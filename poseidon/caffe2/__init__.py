"""Caffe2's Python interface on torch: nets of operators over named blobs, and data-parallel training."""
