"""The store of a job, and what each of its tables holds.

    plain       one tensor, one table
    pool        many small tensors, one table (`placed.py`)
    low rank    tensors that share two tables of their factors (`low_rank.py`); a copy of each
    copy        a tensor that other carriers move: its table brings the first value to every worker

Law: all workers lay out the same tensors in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.lossy.low_rank_matrix import FactorTables
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeOptions
from ps_server import CodecPair, Keeping, Precision, StoreSpec, TableSpec

PRECISION_OF = {
    torch.float32: Precision.FLOAT32,
    torch.bfloat16: Precision.BFLOAT16,
    torch.float16: Precision.FLOAT16,
}
"""The precision of what workers hold, by the type of the tensor."""


def table_spec(
    trained: Trained,
    options: ExchangeOptions,
    *,
    is_copy: bool = False,
    codec: CodecPair | None = None,
    parts: tuple[int, ...] = (),
    plane: int = 0,
) -> TableSpec:
    """Return the table that holds a tensor; the same on every worker.

    Args:
        is_copy: whether the shards only keep a copy of it.
        parts: sizes of the tensors that share the table.
        plane: whose workers push to it.
    """
    kept = Keeping.AVERAGE if trained.statistics else Keeping.GRADIENTS
    return TableSpec(
        name=trained.name,
        size=trained.tensor.numel(),
        staleness=options.staleness,
        rows=options.rows,
        rule=trained.rule,
        keeping=Keeping.COPY if is_copy else kept,
        codec=codec,
        parts=parts,
        held_as=PRECISION_OF[trained.tensor.dtype],
        row_elements=math.prod(trained.tensor.shape[1:]) if trained.looked_up else 0,
        plane=plane,
    )


def store_spec(
    planes: Sequence[Sequence[TableSpec]], settings: ExchangeSettings, member: Membership
) -> StoreSpec:
    """Return the store that holds the tables of all planes, one plane after another; the same on
    every worker.

    Args:
        member: of the job; all members share the store.
    """
    options = member.options
    clip = settings.clip if options.staleness == 0 else None
    outside = sorted({t.plane for tables in planes for t in tables if t.keeping is Keeping.COPY})
    return StoreSpec(
        workers=member.network.size,
        hosts=member.hosts,
        shards=member.shards,
        tables=tuple(table for tables in planes for table in tables),
        consistency=options.consistency,
        clip=clip,
        gradient_scale=settings.gradient_scale,
        start_clock=settings.start_clock,
        loads=member.loads,
        chunks=member.chunks,
        outside_norm=() if clip is None else tuple(outside),
        precision=options.precision,
        virtual_workers=None if member.placed.is_one_each else member.placed,
        quorum=settings.quorum,
        grace_s=settings.grace_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLayout:
    """What the tables of a plane hold.

    Attributes:
        tables: first the factors of tensors that travel by PowerSGD, then the pools.
        first: the number of the first table in the store.
        pools: the indices of the tensors in each of the other tables.
        elsewhere: indices of the tensors that other carriers move.
        factors: the tables of tensors that travel by PowerSGD.
    """

    tensors: Sequence[Trained]
    tables: Sequence[TableSpec]
    pools: Sequence[Sequence[int]]
    pooled: Sequence[Trained]
    elsewhere: frozenset[int] = frozenset()
    factors: Sequence[FactorTables] = ()
    first: int = 0

    @property
    def owners(self) -> list[Sequence[int]]:
        """For each table the indices of the tensors that it is of."""
        found: list[Sequence[int]] = []
        for shared in self.factors:
            exact = shared.indices if shared.how.start else ()
            found += [shared.indices, shared.indices, *((index,) for index in exact)]
        return [*found, *self.pools]

    @property
    def by_low_rank(self) -> frozenset[int]:
        """Indices of the tensors that travel by PowerSGD."""
        return frozenset(index for shared in self.factors for index in shared.indices)

    def encoded(self, store: StoreSpec) -> frozenset[int]:
        """Return the indices of the tensors whose gradients lose bits on the way to the shards."""
        tables = zip(self.tables, self.owners, strict=True)
        return frozenset(i for table, own in tables if store.is_lossy(table) for i in own)
