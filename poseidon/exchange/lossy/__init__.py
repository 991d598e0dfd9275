"""Lossy schemes: codecs by names of tensors, and PowerSGD."""
