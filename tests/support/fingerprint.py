"""The state of an object as bytes: alike before and after if nothing that it holds has changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum

import numpy as np
import torch

# What only counts or locks, and what is the same for ever.
LEFT_OUT = {"counts", "_handlers", "_faults", "_placement", "store", "_store", "spec", "chunk"}


def fingerprint(thing: object) -> bytes:
    """All of it, whatever it is made of."""
    return b"|".join(_pieces(thing))


def _pieces(thing: object) -> Iterator[bytes]:
    if isinstance(thing, torch.Tensor):
        yield thing.detach().numpy().tobytes()
    elif isinstance(thing, np.ndarray):
        yield thing.tobytes()
    elif thing is None or isinstance(thing, int | float | str | bytes | bytearray | Enum):
        yield repr(thing).encode()
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield repr(key).encode()
            yield from _pieces(value)
    elif isinstance(thing, set | frozenset):
        yield repr(sorted(thing)).encode()
    elif isinstance(thing, list | tuple | deque):
        yield b"%d" % len(thing)
        for item in thing:
            yield from _pieces(item)
    else:
        yield from _attributes(thing)


def _attributes(thing: object) -> Iterator[bytes]:
    names = list(getattr(thing, "__dict__", ()))
    for kind in type(thing).__mro__:
        slots = getattr(kind, "__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    for name in names:
        if name not in LEFT_OUT and hasattr(thing, name):
            yield name.encode()
            yield from _pieces(getattr(thing, name))
