"""Which way each tensor takes: bytes per iteration by either, from shapes and the cluster alone.

Law: pure and deterministic; every worker that is handed the same shapes and the same cluster makes the same plan.

Bytes are those that cross the busiest link, sent and received together, in one iteration. Both directions always
carry the same, so a duplex link is busy for half of them at its rate. A fully-connected weight of N x M elements, K
rows a pushing client, P1 pushing clients, and a part w of the model on the shards of a working machine, s on those of
a machine that only serves (Poseidon, USENIX ATC 2017, section 4; BytePS, OSDI 2020, section 4, for w and s):

    server    working machine  2 M N (1 + w (P1 - 2))      with P2 = P1 = 1/w this is 2 M N (P1 + P2 - 2) / P2
              serving machine  2 M N P1 s
    factors   working machine  2 K (P1 - 1) (M + N)
    all-reduce                 4 M N (P1 - 1) / P1         (a ring)

Factors are chosen where they are no more than the server's bytes; every other tensor goes to the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from poseidon.errors import UsageError
from poseidon.exchange.base import Trained
from ps_server import Precision

ELEMENT_BYTES = 4


class Scheme(Enum):
    """How one tensor is kept together."""

    SERVER = "ps"
    """Gradients to the shards, values back."""
    FACTORS = "svb"
    """The two factors of the gradient to every other worker."""
    ALLREDUCE = "allreduce"
    """A sum over all workers through torch.distributed."""
    LOCAL = "local"
    """Nothing leaves the process."""


class ExchangeKind(Enum):
    """What a job asks for, for all its tensors (`--exchange`)."""

    HYBRID = "hybrid"
    """The cheaper of server and factors, tensor by tensor."""
    SERVER = "ps"
    """Everything to the server."""
    FACTORS = "svb"
    """Every fully-connected weight as factors, the rest to the server."""
    ALLREDUCE = "allreduce"
    """Everything by all-reduce; shards only for meetings."""
    LOCAL = "local"
    """One worker, no network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Who pushes, and what part of the model each machine's shards carry.

    Attributes:
        workers: P1, pushing clients; at least 1.
        worker_loads: for each pushing client the relative load of the shards on its machine; 0: it has none.
        server_loads: for each machine that only serves, its load on the same scale; above 0.
    """

    workers: int
    worker_loads: tuple[int, ...]
    server_loads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.workers < 1 or len(self.worker_loads) != self.workers:
            raise UsageError(
                f"a cluster of {self.workers} workers has {len(self.worker_loads)} loads; expected one each"
            )
        if min(self.worker_loads) < 0 or min(self.server_loads, default=1) < 1:
            raise UsageError("a machine's load is below 0, or that of a server below 1")

    @classmethod
    def colocated(cls, workers: int) -> Topology:
        """Every machine works and serves, all alike: P2 = P1."""
        return cls(workers=workers, worker_loads=(1,) * workers)

    @classmethod
    def dedicated(cls, workers: int, servers: int) -> Topology:
        """Machines either work or serve; the servers are all alike."""
        return cls(workers=workers, worker_loads=(0,) * workers, server_loads=(1,) * servers)

    @classmethod
    def of_shards(cls, workers: int, homes: Sequence[int], loads: Sequence[int] = ()) -> Topology:
        """From shards: where each lives and what it carries.

        Args:
            workers: pushing clients.
            homes: for each shard the pushing client on whose machine it runs; -1 - j for serving machine j.
            loads: for each shard its relative load; empty: all alike.
        """
        weights = tuple(loads) or (1,) * len(homes)
        own = [0] * workers
        others: dict[int, int] = {}
        for home, load in zip(homes, weights, strict=True):
            if home >= 0:
                own[home] += load
            else:
                others[home] = others.get(home, 0) + load
        return cls(workers=workers, worker_loads=tuple(own), server_loads=tuple(others.values()))

    @property
    def total_load(self) -> int:
        """The whole model on the scale of the loads; 0 without any shard."""
        return sum(self.worker_loads) + sum(self.server_loads)

    @property
    def servers(self) -> int:
        """P2, machines with shards."""
        return sum(load > 0 for load in self.worker_loads) + len(self.server_loads)


def server_bytes(elements: int, topology: Topology, there_and_back: int = 2 * ELEMENT_BYTES) -> int:
    """Bytes that one tensor brings to the busiest link by way of the server; 0 for a worker that is its own server.

    Args:
        elements: of the tensor.
        topology: with at least one shard.
        there_and_back: bytes of one element's gradient and of its value on the wire.
    """
    total = topology.total_load
    working = total + max(topology.worker_loads) * (topology.workers - 2)
    serving = topology.workers * max(topology.server_loads, default=0)
    return -(-elements * there_and_back * max(working, serving) // total)


def factor_bytes(rows: int, n: int, m: int, workers: int) -> int:
    """Bytes that the factors of an n x m gradient bring to each worker's link: 2 K (P1 - 1) (M + N) floats.

    Args:
        rows: K, rows of both factors that one pushing client has in an iteration.
        n: the gradient's rows (outputs).
        m: the gradient's columns (inputs).
        workers: P1.
    """
    return 2 * rows * (workers - 1) * (m + n) * ELEMENT_BYTES


def allreduce_bytes(elements: int, workers: int) -> int:
    """Bytes that a ring all-reduce of one tensor brings to each worker's link: 4 elements (P1 - 1) / P1 floats."""
    return -(-4 * elements * (workers - 1) * ELEMENT_BYTES // workers)


def _wire_bytes(precision: Precision) -> int:
    return ELEMENT_BYTES if precision is Precision.FLOAT32 else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was decided for one tensor.

    Attributes:
        index: its place among the trained tensors.
        name: for people.
        shape: its shape.
        scheme: the way it takes.
        server_bytes: on the busiest link by way of the server; 0 where there is none.
        factor_bytes: on each worker's link as factors; None where its gradient has no factors.
        allreduce_bytes: on each worker's link by a ring.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    scheme: Scheme
    server_bytes: int
    factor_bytes: int | None
    allreduce_bytes: int

    @property
    def bytes(self) -> int:
        """By the way that it takes."""
        if self.scheme is Scheme.FACTORS:
            return self.factor_bytes or 0
        return {Scheme.SERVER: self.server_bytes, Scheme.ALLREDUCE: self.allreduce_bytes}.get(self.scheme, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePlan:
    """One choice for each trained tensor, in their order."""

    choices: tuple[Choice, ...]

    def of(self, scheme: Scheme) -> tuple[int, ...]:
        """The indices of the tensors that go this way."""
        return tuple(choice.index for choice in self.choices if choice.scheme is scheme)

    @property
    def bytes(self) -> int:
        """On the busiest link in an iteration, sent and received, if one machine is the busiest for all tensors."""
        return sum(choice.bytes for choice in self.choices)

    def table(self) -> list[str]:
        """The plan as aligned lines for people; the last line sums up."""
        head = ("tensor", "shape", "way", "by ps", "by svb", "by allreduce")
        rows = [_row(choice) for choice in self.choices]
        ps = sum(choice.server_bytes for choice in self.choices)
        ring = sum(choice.allreduce_bytes for choice in self.choices)
        foot = ("all", "", "", human_bytes(ps), "", human_bytes(ring))
        return [*_aligned([head, *rows, foot]), f"this plan: {self._load()}"]

    def in_words(self) -> str:
        """The plan in one clause: how many tensors go which way, and their bytes.

        >>> ExchangePlan(choices=()).in_words()
        'no tensor is exchanged: 0 B an iteration on the busiest link, both directions'
        """
        counts = [(len(self.of(scheme)), scheme.value) for scheme in Scheme]
        ways = ", ".join(f"{count} by {way}" for count, way in counts if count)
        return f"{'tensors exchanged: ' + ways if ways else 'no tensor is exchanged'}: {self._load()}"

    def _load(self) -> str:
        return f"{human_bytes(self.bytes)} an iteration on the busiest link, both directions"


def choose(
    tensors: Sequence[Trained],
    kind: ExchangeKind,
    topology: Topology,
    *,
    gradients: Precision = Precision.FLOAT32,
    values: Precision = Precision.FLOAT32,
) -> ExchangePlan:
    """Decide the way of every tensor.

    Args:
        tensors: in the order of the store's tables.
        kind: what the job asks for.
        topology: pushing clients and shards.
        gradients: on their way to the server; factors are float32.
        values: on their way back.
    """
    choices = []
    there_and_back = _wire_bytes(gradients) + _wire_bytes(values)
    for index, trained in enumerate(tensors):
        shape, elements = tuple(trained.tensor.shape), trained.tensor.numel()
        rows = 0 if trained.statistics or len(shape) != 2 else trained.factor_rows
        by_server = server_bytes(elements, topology, there_and_back) if topology.total_load else 0
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
            )
        )
    return ExchangePlan(choices=tuple(choices))


def _scheme(kind: ExchangeKind, topology: Topology, by_server: int, by_factors: int | None) -> Scheme:
    if topology.workers == 1 or kind is ExchangeKind.LOCAL:
        return Scheme.SERVER if topology.total_load and kind is not ExchangeKind.LOCAL else Scheme.LOCAL
    if kind is ExchangeKind.ALLREDUCE:
        return Scheme.ALLREDUCE
    if by_factors is None or kind is ExchangeKind.SERVER:
        return Scheme.SERVER
    return Scheme.FACTORS if kind is ExchangeKind.FACTORS or by_factors <= by_server else Scheme.SERVER


def human_bytes(count: int) -> str:
    """`205.52 MB`: three to five digits and a decimal unit."""
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
        choice.scheme.value,
        human_bytes(choice.server_bytes),
        factors,
        human_bytes(choice.allreduce_bytes),
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Names and ways to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        left = [word.ljust(width) for word, width in zip(row[:3], widths[:3], strict=True)]
        right = [word.rjust(width) for word, width in zip(row[3:], widths[3:], strict=True)]
        lines.append("  ".join([*left, *right]).rstrip())
    return lines
