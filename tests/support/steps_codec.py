"""A codec of one file, as docs/compression.md shows it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ps_server import Codec, SpecError
from ps_server.codecs.base import Array, Encoded, Key


@dataclass(frozen=True)
class Steps(Codec):
    """Whole multiples of a step, in 16 bits; what is not a number is 0."""

    name = "steps"
    step: float

    def __post_init__(self) -> None:
        if not 0 < self.step < float("inf"):
            raise SpecError(f"steps:{self.step:g} is not a codec; expected a step above 0")

    def size(self, elements: int) -> int:
        return 2 * (elements + elements % 2)

    def encode(self, exact: Array, out: Encoded, key: Key) -> None:
        steps = np.clip(np.rint(exact / np.float32(self.step)), -32767, 32767)
        out[2 * exact.size :] = 0
        out[: 2 * exact.size].view("<i2")[:] = np.nan_to_num(steps)

    def decode(self, encoded: Encoded, out: Array, key: Key) -> None:
        np.multiply(encoded[: 2 * out.size].view("<i2"), np.float32(self.step), out=out)
