"""The choice of `--exchange=auto`: the scheme of each tensor by time, from measured rates.

Law: pure and deterministic. All workers have the same rates, so all make the same choice.

The time of an exchange is modelled as a sum over its tensors, of E elements, and a constant of its
dense scheme:

    server       4 E x server_s_per_byte
    all-reduce   4 E x allreduce_s_per_byte
    factors      bytes on the link (`cost.py`) x link_s_per_byte
                 + 2 K P N M x product_s_per_flop + 4 N M x update_s_per_byte

The measurement runs on all workers at the same time, so the rates include links, processors and
what shares them. Server and all-reduce are proportional to the elements, so the dense tensors of a
plan have one of both. A tensor with factors takes them where they are faster. A compressed tensor
goes to the server, or as factors where these are faster and no more bytes than its compression
sends: the rates do not know compressions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from poseidon.exchange.cost import ELEMENT_BYTES, Choice
from poseidon.exchange.options import Scheme

LEAST_GAIN = 1.3
"""All-reduce is chosen where it is faster than the server by this factor: the server's values
travel during the next forward pass too, which no measurement before training shows.
"""
BUSY = 0.15
"""Where all-reduce keeps more of the processors that compute busy, an iteration takes longer by
processor time, and all-reduce takes less of it than workers and shards together.
"""
LEAST_GAIN_IF_BUSY = 0.7
"""Then all-reduce is chosen unless the server is clearly faster, because more hosts serve. Times
of seconds on busy processors vary by as much.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The measured cost of each scheme, of the slowest worker, in seconds.

    Attributes:
        server_s: of an exchange through the server, however few its bytes.
        server_s_per_byte: of a byte of a tensor that goes through the server.
        allreduce_s: as `server_s`, of all-reduce.
        allreduce_s_per_byte: as `server_s_per_byte`.
        link_s_per_byte: of a byte of factors on the busiest link, sent and received together.
        product_s_per_flop: of a floating-point operation of a product of factors.
        update_s_per_byte: of a byte of a weight that is updated from factors, without the product.
            A measurement has both in `product_s_per_flop`, for a job's rows.
        busy: the part of the processors that compute which all-reduce uses, 0 to 1; 0: they are
            accelerators.
    """

    server_s: float
    server_s_per_byte: float
    allreduce_s: float
    allreduce_s_per_byte: float
    link_s_per_byte: float
    product_s_per_flop: float
    update_s_per_byte: float = 0.0
    busy: float = 0.0

    @classmethod
    def slowest(cls, rates: Sequence[Rates]) -> Rates:
        """Return for each cost the greatest of these."""
        return cls(
            **{entry.name: max(getattr(one, entry.name) for one in rates) for entry in fields(cls)}
        )

    def summary(self) -> str:
        """Return the rates as the end of a log line."""
        rates = [
            f"server {_cost(self.server_s, self.server_s_per_byte)}",
            f"all-reduce {_cost(self.allreduce_s, self.allreduce_s_per_byte)}",
        ]
        if self.busy > 0:
            rates[-1] += f" and {self.busy:.0%} of the processors"
        if self.product_s_per_flop > 0:
            rates.append(f"products of factors {1e-9 / self.product_s_per_flop:.1f} GFlop/s")
        return ", ".join(rates)


def _cost(s: float, s_per_byte: float) -> str:
    return f"{1e3 * s:.1f} ms + bytes at {1e-6 / s_per_byte:.0f} MB/s"


def fastest_schemes(
    choices: Sequence[Choice], rows: Sequence[int], workers: int, rates: Rates
) -> tuple[Scheme, ...]:
    """Return the scheme of each tensor.

    Args:
        choices: of all tensors; their schemes do not matter.
        rows: K of each tensor, `Trained.factor_rows`.
        workers: P.
    """

    def schemes(dense: Scheme) -> tuple[Scheme, ...]:
        found = []
        for choice, k in zip(choices, rows, strict=True):
            own = Scheme.SERVER if choice.needs_shards else dense
            if choice.factor_bytes is not None and not (
                choice.compression and choice.factor_bytes > choice.server_bytes
            ):
                own = min(own, Scheme.FACTORS, key=lambda s: _seconds(choice, s, k, workers, rates))
            found.append(own)
        return tuple(found)

    def seconds(plan: Sequence[Scheme]) -> float:
        each = (
            _seconds(c, s, k, workers, rates) for c, s, k in zip(choices, plan, rows, strict=True)
        )
        return sum(each) + (rates.allreduce_s if Scheme.ALLREDUCE in plan else rates.server_s)

    by_server, by_allreduce = schemes(Scheme.SERVER), schemes(Scheme.ALLREDUCE)
    gain = LEAST_GAIN_IF_BUSY if rates.busy > BUSY else LEAST_GAIN
    return by_allreduce if seconds(by_allreduce) * gain < seconds(by_server) else by_server


def _seconds(choice: Choice, scheme: Scheme, rows: int, workers: int, rates: Rates) -> float:
    size = ELEMENT_BYTES * math.prod(choice.shape)
    if scheme is Scheme.FACTORS:
        assert choice.factor_bytes is not None
        operations = 2.0 * rows * workers * math.prod(choice.shape)
        return (
            choice.factor_bytes * rates.link_s_per_byte
            + operations * rates.product_s_per_flop
            + size * rates.update_s_per_byte
        )
    return size * (
        rates.allreduce_s_per_byte if scheme is Scheme.ALLREDUCE else rates.server_s_per_byte
    )
