"""Caffe2's operators as functions over torch tensors, by family; `registry` is the contract.

The registry imports every module of this package when it is first asked for an operator, so that a
new family needs no other line.
"""
