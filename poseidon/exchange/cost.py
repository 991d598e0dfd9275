"""The cost model: the scheme of each tensor by its bytes in an iteration, from shapes and the
cluster alone.

Law: pure and deterministic. All workers make the same plan from the same shapes and the same
cluster.

Bytes are what crosses the busiest link in one iteration, sent and received together. Both
directions carry as much, so a duplex link is busy for half of them at its rate. For a
fully-connected weight of N x M elements, K rows in each pushing client, P1 pushing clients, and the
part w of the model on the shards of a host with workers, s on the shards of a host that only serves
(Poseidon, USENIX ATC 2017, section 4; BytePS, OSDI 2020, section 4, for w and s):

    server      host with workers  2 M N (1 + w (P1 - 2))      with P2 = P1 = 1/w this is 2 M N (P1 + P2 - 2) / P2
                host that serves   2 M N P1 s
    factors     host with workers  2 K (P1 - 1) (M + N)
    all-reduce                     4 M N (P1 - 1) / P1         (a ring)

Factors are chosen where they are no more than the server's bytes; every other tensor goes to the
server. With compression the server's bytes are what it sends: 8 MN above, 4 for each
direction, becomes the sum of its sizes. For a matrix whose rows are looked up they are the most
that can travel: rows without a change are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from poseidon.base.text_files import aligned
from poseidon.errors import UsageError
from poseidon.exchange.base import Trained
from poseidon.exchange.lossy.compression import Compression, wire_bytes
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, Scheme
from ps_server import CodecPair, Precision

ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The clients that push, and the load of the shards on each host.

    Attributes:
        worker_loads: for each pushing client the relative load of the shards on its host; 0: it has
            none.
        server_loads: for each host that only serves, its load on the same scale; above 0.
    """

    worker_loads: tuple[int, ...]
    server_loads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if min(self.worker_loads, default=-1) < 0 or min(self.server_loads, default=1) < 1:
            raise UsageError(
                "no host has workers, the load of one is below 0, or the load of a server is below 1"
            )

    @property
    def workers(self) -> int:
        """P1, pushing clients; at least 1."""
        return len(self.worker_loads)

    @classmethod
    def colocated(cls, workers: int) -> Topology:
        """Return a cluster whose hosts all have workers and equal shards: P2 = P1."""
        return cls(worker_loads=(1,) * workers)

    @classmethod
    def of_job(cls, member: Membership) -> Topology:
        """Return the hosts that push, and the load of each host's shards. Without shards: a shard
        on each host, to compare with. Where hosts do not average: as many such hosts as there are
        virtual workers, so that the plan depends on their number alone.
        """
        if not member.averages:
            return cls.colocated(member.placed.count)
        clients, shards = member.seat.host_count, member.shards
        if not shards:
            return cls.colocated(clients)
        homes = member.homes or tuple(shard * clients // shards for shard in range(shards))
        return cls.of_shards(clients, homes, member.loads)

    @classmethod
    def of_shards(cls, workers: int, homes: Sequence[int], loads: Sequence[int] = ()) -> Topology:
        """Return the cluster of these shards.

        Args:
            workers: pushing clients.
            homes: for each shard the pushing client on whose host it runs; -1 - j for serving host
                j.
            loads: for each shard its relative load; empty: all equal.
        """
        loads = tuple(loads) or (1,) * len(homes)
        own = [0] * workers
        others: dict[int, int] = {}
        for home, load in zip(homes, loads, strict=True):
            if home >= 0:
                own[home] += load
            else:
                others[home] = others.get(home, 0) + load
        return cls(worker_loads=tuple(own), server_loads=tuple(others.values()))

    @property
    def total_load(self) -> int:
        """The load of the whole model; 0 without shards."""
        return sum(self.worker_loads) + sum(self.server_loads)


def server_bytes(elements: int, topology: Topology, element_bytes: int = 2 * ELEMENT_BYTES) -> int:
    """Return the bytes on the busiest link of one tensor that goes to the server;
    0 for a worker that is its own server.

    Args:
        elements: of the tensor.
        topology: with at least one shard.
        element_bytes: bytes on the wire of the gradient and the value of one element together.
    """
    total = topology.total_load
    working = total + max(topology.worker_loads) * (topology.workers - 2)
    serving = topology.workers * max(topology.server_loads, default=0)
    return -(-elements * element_bytes * max(working, serving) // total)


def factor_bytes(rows: int, n: int, m: int, workers: int) -> int:
    """Return the bytes on each worker's link of the factors of an n x m gradient: 2 K (P1 - 1)
    (M + N) floats.

    Args:
        rows: K, rows of both factors that one pushing client sends in an iteration.
        n: the gradient's rows (outputs).
        m: the gradient's columns (inputs).
        workers: P1.
    """
    return 2 * rows * (workers - 1) * (m + n) * ELEMENT_BYTES


def allreduce_bytes(elements: int, workers: int) -> int:
    """Return the bytes on each worker's link of one tensor's ring all-reduce: 4 elements (P1 -
    1) / P1 floats.
    """
    return -(-4 * elements * (workers - 1) * ELEMENT_BYTES // workers)


def _wire_bytes(precision: Precision) -> int:
    return ELEMENT_BYTES if precision is Precision.FLOAT32 else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The scheme of one tensor, and its cost by every scheme.

    Attributes:
        server_bytes: on the busiest link through the server; 0 where there is none.
        factor_bytes: on each worker's link as factors; None where its gradient has no factors.
        allreduce_bytes: on each worker's link by a ring all-reduce.
        compression: of its gradients and values where it goes to the server.
        packs_rows: whether rows without a change are left out there.
        has_16_bits: whether workers hold 16 bits, and the shards float32.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    scheme: Scheme
    server_bytes: int
    factor_bytes: int | None
    allreduce_bytes: int
    compression: Compression | None = None
    packs_rows: bool = False
    has_16_bits: bool = False

    @property
    def needs_shards(self) -> bool:
        """Whether it is never summed by all-reduce where there are shards."""
        return self.compression is not None or self.packs_rows or self.has_16_bits

    @property
    def is_compressed(self) -> bool:
        """Whether it travels with its compression."""
        return self.compression is not None and self.scheme is Scheme.SERVER

    @property
    def codec(self) -> CodecPair | None:
        """Its codecs for the table that has it; None: there are none."""
        found = self.compression
        return found if self.is_compressed and isinstance(found, CodecPair) else None

    @property
    def bytes(self) -> int:
        """Bytes on the busiest link by its scheme."""
        if self.scheme is Scheme.FACTORS:
            return self.factor_bytes or 0
        return {Scheme.SERVER: self.server_bytes, Scheme.ALLREDUCE: self.allreduce_bytes}.get(
            self.scheme, 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePlan:
    """The plan of a job.

    Attributes:
        choices: one for each trained tensor, in their order.
        local_steps: iterations from one exchange to the next, with local steps; 0: one.
        basis: what a choice follows from that does not follow from the bytes: measured
            rates, or a snapshot; the end of a line.
    """

    choices: tuple[Choice, ...]
    local_steps: int = 0
    basis: str = ""

    def of(self, scheme: Scheme) -> tuple[int, ...]:
        """Return the indices of the tensors of this scheme."""
        return tuple(choice.index for choice in self.choices if choice.scheme is scheme)

    @property
    def bytes(self) -> int:
        """Bytes on the busiest link in an iteration, sent and received, if one host is the
        busiest for all tensors.
        """
        return sum(choice.bytes for choice in self.choices)

    def table(self) -> list[str]:
        """Return the plan as lines of an aligned table; the last line has the total."""
        head = ("tensor", "shape", "scheme", "by ps", "by svb", "by allreduce")
        rows = [_row(choice) for choice in self.choices]
        ps = sum(choice.server_bytes for choice in self.choices)
        ring = sum(choice.allreduce_bytes for choice in self.choices)
        foot = ("all", "", "", human_bytes(ps), "", human_bytes(ring))
        return [*aligned([head, *rows, foot], left=3), f"this plan: {self._load()}"]

    def summary(self) -> str:
        """Return the number of tensors of each scheme, and their bytes, for one log line.

        >>> ExchangePlan(choices=()).summary()
        'no tensor is exchanged: 0 B an iteration on the busiest link, both directions'
        """
        counts = [(len(self.of(scheme)), scheme.value) for scheme in Scheme]
        schemes = ", ".join(f"{count} by {scheme}" for count, scheme in counts if count)
        if compressed := [
            str(choice.compression) for choice in self.choices if choice.is_compressed
        ]:
            schemes += (
                f", {len(compressed)} of them compressed by {', '.join(sorted(set(compressed)))}"
            )
        return f"{'tensors exchanged: ' + schemes if schemes else 'no tensor is exchanged'}: {self._load()}"

    def _load(self) -> str:
        once = f"a round of {self.local_steps} local steps" if self.local_steps else "an iteration"
        load = f"{human_bytes(self.bytes)} {once} on the busiest link, both directions"
        return f"{load}; {self.basis}" if self.basis else load


def choose(
    tensors: Sequence[Trained],
    kind: ExchangeKind,
    topology: Topology,
    *,
    gradients: Precision = Precision.FLOAT32,
    values: Precision = Precision.FLOAT32,
    compressions: Sequence[Compression | None] = (),
    packs_rows: bool = False,
) -> ExchangePlan:
    """Choose the scheme of every tensor.

    Args:
        tensors: in the order of the store's tables.
        kind: the exchange of the job.
        topology: pushing clients and shards.
        gradients: precision of the gradients that are sent to the server; factors are float32.
        values: precision of the values that are sent back.
        compressions: of each tensor, in place of these precisions; empty: none has one.
        packs_rows: whether the store can leave out rows without a change.
    """
    choices = []
    element_bytes = _wire_bytes(gradients) + _wire_bytes(values)
    compressions = list(compressions) or [None] * len(tensors)
    for index, trained in enumerate(tensors):
        shape, elements = tuple(trained.tensor.shape), trained.tensor.numel()
        half = trained.tensor.dtype is not torch.float32
        rows = 0 if trained.statistics or len(shape) != 2 or half else trained.factor_rows
        compression = compressions[index]
        sent = elements * (2 * trained.tensor.itemsize if half else element_bytes)
        if compression is not None:
            sent = wire_bytes(compression, trained.tensor)
        by_server = server_bytes(sent, topology, 1) if topology.total_load else 0
        by_factors = factor_bytes(rows, shape[0], shape[1], topology.workers) if rows else None
        choices.append(
            Choice(
                index=index,
                name=trained.name,
                shape=shape,
                scheme=_scheme(kind, topology, by_server, by_factors),
                server_bytes=by_server,
                factor_bytes=by_factors,
                allreduce_bytes=allreduce_bytes(elements, topology.workers),
                compression=compression,
                packs_rows=packs_rows and trained.looked_up and compression is None,
                has_16_bits=half,
            )
        )
    return ExchangePlan(choices=tuple(choices))


def _scheme(
    kind: ExchangeKind, topology: Topology, by_server: int, by_factors: int | None
) -> Scheme:
    alone = topology.workers == 1
    if kind is ExchangeKind.LOCAL or (alone and not topology.total_load):
        return Scheme.LOCAL
    if kind is ExchangeKind.ALLREDUCE and not alone:
        return Scheme.ALLREDUCE
    if alone or by_factors is None or kind is ExchangeKind.SERVER:
        return Scheme.SERVER
    is_cheaper = by_factors <= by_server
    return Scheme.FACTORS if is_cheaper or kind is ExchangeKind.FACTORS else Scheme.SERVER


def human_bytes(count: int) -> str:
    """Return a size with three to five digits and a decimal unit: `205.52 MB`."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"


def _row(choice: Choice) -> tuple[str, ...]:
    factors = "-" if choice.factor_bytes is None else human_bytes(choice.factor_bytes)
    return (
        choice.name,
        "x".join(map(str, choice.shape)) or "1",
        _scheme_and_form(choice),
        human_bytes(choice.server_bytes),
        factors,
        human_bytes(choice.allreduce_bytes),
    )


def _scheme_and_form(choice: Choice) -> str:
    if choice.is_compressed:
        return f"{choice.scheme.value} {choice.compression}"
    rows = choice.packs_rows and choice.scheme is Scheme.SERVER
    return f"{choice.scheme.value} rows" if rows else choice.scheme.value
