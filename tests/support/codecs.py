"""What tests of codecs share: encoding and decoding by a codec's name."""

from __future__ import annotations

import numpy as np

from ps_server.codecs.base import Array, Coder, Encoded, Key
from ps_server.codecs.registry import codec_of

KEY = Key(3, 0, 7)


def encoded(name: str, exact: Array, key: Key = KEY) -> Encoded:
    """Encode with nothing held back."""
    codec = Coder(codec_of(name))
    out = np.full(codec.size(exact.size), 0xEE, np.uint8)
    with np.errstate(all="ignore"):
        codec.compress(np.zeros_like(exact), exact, out, key)
    return out


def decoded(name: str, data: Encoded, elements: int, key: Key = KEY) -> Array:
    """Check and decode."""
    codec = Coder(codec_of(name))
    out = np.zeros(elements, np.float32)
    codec.check(data, elements)
    codec.add(out, data, key)
    return out


def numbers(size: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)
