"""Caffe2's operators as functions over torch tensors, by family; `registry` is the contract.

Every module of this package is imported here, so that a new family needs no other line.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
