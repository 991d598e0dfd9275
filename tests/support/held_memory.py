"""How many bytes an object holds, with all that it refers to: more after many messages than before if it keeps them."""

from __future__ import annotations

import gc
import sys
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType

import numpy as np
import torch

SHARED_BY_ALL = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType)
"""What belongs to the program; whoever refers to it does not hold it."""


def held_bytes(*roots: object) -> int:
    """Of all these together, each object once; what counts and caches keep is in it, too."""
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
