"""The options of arithmetic: what a worker computes in, and by which kernels.

Law: a field declares its flag, for every command that has it. This module imports no torch;
`poseidon.exchange.device.compute_on` is where they act, and the nets of `poseidon.caffe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from poseidon.flags.flag import Section, option


class Arithmetic(Enum):
    """A value of --precision."""

    FLOAT32 = "float32"
    """float32 throughout."""
    TF32 = "tf32"
    """float32, whose products a GPU computes with 10 bits of the mantissa."""
    BFLOAT16 = "bfloat16"
    """Products, and the layers between them that keep the type, in bfloat16."""
    FLOAT16 = "float16"
    """The same in float16, with scaled losses."""

    @property
    def has_16_bits(self) -> bool:
        return self in (Arithmetic.BFLOAT16, Arithmetic.FLOAT16)


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """The options."""

    precision: Arithmetic = option(
        Arithmetic.FLOAT32,
        "{choices}: of a net's layers",
        Section.MACHINES,
        metavar="TYPE",
        rare=True,
    )
    channels_last: bool = option(
        False, "convolve images with channels last in memory", Section.MACHINES, rare=True
    )
    deterministic: bool = option(
        False, "only kernels that give the same bits each time", Section.MACHINES, rare=True
    )


DEFAULT_COMPUTE = ComputeOptions()
