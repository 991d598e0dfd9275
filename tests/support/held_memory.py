"""The bytes that an object holds, with all that it refers to: they grow if it keeps messages."""

from __future__ import annotations

import gc
import sys
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType

import numpy as np
import torch

SHARED_BY_ALL = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType)
"""Types of the program itself; a reference to them does not count."""


def held_bytes(*roots: object) -> int:
    """Return the bytes of all roots together, each object once; counters and caches are
    included.
    """
    seen: dict[int, object] = {}
    left = list(roots)
    total = 0
    while left:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, SHARED_BY_ALL):
            continue
        seen[id(thing)] = thing
        total += sys.getsizeof(thing)
        if isinstance(thing, torch.Tensor):
            total += thing.untyped_storage().nbytes()
        elif isinstance(thing, np.ndarray) and thing.base is not None:
            left.append(thing.base)  # the collector does not know of it
        left += gc.get_referents(thing)
    return total
