"""Compression by a loss budget: for each tensor the one with the fewest bytes among
those whose measured loss is within the budget.

No formula knows the loss of a training that has not run. So the budget is compared with what was
measured: the largest increase of the final loss over the nets in docs/compression.md, against the
same training without compression. The median of several seeds counts. It is experience, not a bound.

Law: the choice follows from the budget and the tensor's shape alone. So all
workers choose the same, and a resumed job too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from poseidon.errors import UsageError
from poseidon.exchange.lossy.low_rank_matrix import ELEMENT_BYTES, LowRank
from ps_server import Codec, CodecPair
from ps_server.codecs.int4 import Int4
from ps_server.codecs.int8 import Int8

AUTO = "auto"


def wire_bytes(compression: CodecPair | LowRank, tensor: Tensor) -> int:
    """Return the bytes that are sent of a tensor, gradient and value together."""
    if isinstance(compression, LowRank):
        return 2 * compression.bytes(tensor)
    ways = (compression.gradients, compression.values)
    return sum(
        ELEMENT_BYTES * tensor.numel() if way is None else way.size(tensor.numel()) for way in ways
    )


def _both(codec: Codec) -> CodecPair:
    return CodecPair(codec, codec)


MEASURED: tuple[tuple[CodecPair | LowRank, float], ...] = (
    (_both(Int8()), 0.005),
    (_both(Int4()), 0.01),
    (LowRank(4, codec=Int8()), 0.1),
)
"""Compressions, and the largest share by which each has raised the final loss of a measured net,
rounded up.
"""


@dataclass(frozen=True, slots=True)
class Auto:
    """The choice of compressions by a loss budget.

    Attributes:
        budget: the largest share by which the measured loss may be above the loss without one,
            such as 0.01.

    Raises:
        UsageError: there is no budget, or it is below the measured share of every compression.
    """

    budget: float | None

    def __post_init__(self) -> None:
        least = min(loss for _, loss in MEASURED)
        if self.budget is None:
            raise UsageError(
                f"--compress={AUTO} needs --loss_budget=F, or {AUTO}:F; expected F such as 0.01 "
                "for 1 % more loss"
            )
        if not (math.isfinite(self.budget) and self.budget >= least):
            raise UsageError(
                f"a loss budget of {self.budget:g} is below the measured loss of every compression; "
                f"expected {least:g} or more, or no --compress"
            )

    def __str__(self) -> str:
        return AUTO

    def fits(self, tensor: Tensor) -> bool:
        """Return whether there is a compression for a tensor."""
        return tensor.numel() > 0

    def choose(self, tensor: Tensor) -> CodecPair | LowRank:
        """Return the compression of a tensor: that with the fewest bytes, of equal ones that with less
        loss.
        """
        assert self.budget is not None
        allowed = [each for each, loss in MEASURED if loss <= self.budget]
        fitting = [each for each in allowed if not isinstance(each, LowRank) or each.fits(tensor)]
        return min(fitting, key=lambda each: wire_bytes(each, tensor))
