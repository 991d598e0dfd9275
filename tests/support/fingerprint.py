"""A fingerprint of an object's state: equal before and after if nothing in it has changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import cache

import numpy as np
import torch

PLAIN = (int, float, str, bytes, bytearray, Enum)
# What only counts or locks, and what is the same for ever.
LEFT_OUT = {"counts", "_handlers", "_faults", "_placement", "store", "_store", "spec", "chunk"}


def fingerprint(thing: object) -> bytes:
    """Return a digest of an object and all that it refers to."""
    pieces: list[bytes] = []
    _note(thing, pieces.append)
    return b"|".join(pieces)


def _note(thing: object, note: Callable[[bytes], None]) -> None:
    if thing is None or isinstance(thing, PLAIN):
        note(repr(thing).encode())
    elif isinstance(thing, torch.Tensor):
        note(thing.detach().numpy().tobytes())
    elif isinstance(thing, np.ndarray):
        note(thing.tobytes())
    elif isinstance(thing, dict):
        for key, value in thing.items():
            note(repr(key).encode())
            _note(value, note)
    elif isinstance(thing, set | frozenset):
        note(repr(sorted(thing)).encode())
    elif isinstance(thing, list | tuple | deque):
        note(b"%d" % len(thing))
        for item in thing:
            _note(item, note)
    else:
        for name in (*getattr(thing, "__dict__", ()), *_slots(type(thing))):
            if name not in LEFT_OUT and hasattr(thing, name):
                note(name.encode())
                _note(getattr(thing, name), note)


@cache
def _slots(kind: type) -> tuple[str, ...]:
    """Return the slots of a class and its bases."""
    slots = [each.__dict__.get("__slots__", ()) for each in kind.__mro__]
    return tuple(
        name for names in slots for name in ((names,) if isinstance(names, str) else names)
    )
