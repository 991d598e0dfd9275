"""Caffe2's operators as functions over torch tensors, by family; `registry` is the contract.

The registry imports all modules of this package at the first use: new families are found.
"""
