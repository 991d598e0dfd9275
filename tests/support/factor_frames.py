"""Factors for tests: pairs of arrays, and the frames of their messages."""

from __future__ import annotations

import msgpack
import numpy as np

from poseidon.exchange.base import Array
from poseidon.exchange.factors.factor_rounds import Pair
from poseidon.exchange.worker_links import VERSION


def pair_of(u: Array, v: Array) -> Pair:
    """Return factors of these values, in flat memory of their own."""
    flat = np.concatenate([u.ravel(), v.ravel()])
    return Pair.over(flat, len(u), u.shape[1], v.shape[1])


def frames_of(table: int, clock: int, pair: Pair) -> list[bytes]:
    """Return the frames of a message, without the empty one of a shared link."""
    header = [VERSION, "Factors", table, clock, len(pair.u)]
    return [msgpack.packb(header), pair.flat.tobytes()]
