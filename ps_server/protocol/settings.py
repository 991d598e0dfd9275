"""The settings of a store: tables, their update rules, the consistency model.

Frozen and checked once.

Law: every worker sends the same `StoreSpec` to every shard, and everything that both sides must
agree on (placement, rules, staleness) is computed from it by pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ps_server.errors import SpecError
from ps_server.protocol.seats import Seats, seats_of
from ps_server.protocol.virtual_workers import Node, VirtualWorkers

if TYPE_CHECKING:
    from ps_server.codecs.base import Codec
    from ps_server.codecs.registry import CodecPair  # it imports torch

CHUNK_ELEMENTS = 512 * 1024
"""Most elements of a chunk unless the table says otherwise: 2 MiB of float32, as Poseidon's KV
pairs.
"""

CHUNKS_A_SHARD = 12
"""Least chunks that a shard's part is cut into, while they are not small."""
CHUNKS_A_SERVER = 2 * CHUNKS_A_SHARD
"""The same where some shards are on hosts without workers."""

MAX_TABLES = 65_536
MAX_WORKERS = 4_096
MAX_CLOCK = 2**40
MAX_TABLE_ELEMENTS = 2**40
NORM_SEGMENT_ELEMENTS = 4 * 1024
"""Elements whose squares are added up by themselves. Other tables are cut at multiples of this,
unless their rows are given.
"""
MAX_NEWTON_SCHULZ_STEPS = 100


class Consistency(Enum):
    """The consistency models (Bösen's names)."""

    SSP = "SSP"
    """A worker requests what it is about to read; the shard answers when the bound holds."""
    SSP_PUSH = "SSPPush"
    """The shard sends every changed chunk to every worker as soon as the slowest clock moves."""
    SSP_AGGR = "SSPAggr"
    """As SSPPush, but workers with a bandwidth budget hold back, added up, changes that the
    bound does not need yet.
    """


class Keeping(Enum):
    """What the shards keep of a table, and what its next value is made of."""

    GRADIENTS = "gradients"
    """The rule and the workers' average gradient (staleness 0), or the workers' own changes
    (staleness > 0).
    """
    AVERAGE = "average"
    """At staleness 0 each worker pushes a value of its own, and their average is the next value."""
    COPY = "copy"
    """The first value, which no push changes: the workers exchange the table among
    themselves.
    """


class Precision(Enum):
    """The precision of gradients and values on the wire; sums and values are float32 everywhere."""

    FLOAT32 = "float32"
    """Not rounded."""
    FLOAT16 = "float16"
    """Half as many bytes; what rounding loses is carried into the next iteration (error
    feedback).
    """
    BFLOAT16 = "bfloat16"
    """As FLOAT16, with float32's range and fewer digits."""


class RuleKind(Enum):
    """The update rules: Caffe's by its names (`SolverParameter.type`), and torch.optim's."""

    SGD = "SGD"
    """Momentum: h <- m h + rate g; w <- w - h."""
    NESTEROV = "Nesterov"
    """Momentum with look-ahead: w <- w - ((1+m) h_new - m h_old)."""
    ADAGRAD = "AdaGrad"
    """Each coordinate's rate shrinks with the sum of its squared gradients."""
    RMSPROP = "RMSProp"
    """As AdaGrad, over a decaying window."""
    ADADELTA = "AdaDelta"
    """Step sizes from the ratio of past steps to past gradients."""
    ADAM = "Adam"
    """First and second moments with bias correction."""
    TORCH_SGD = "torch.SGD"
    """torch.optim.SGD: h <- m h + (1 - dampening) g; w <- w - rate h."""
    TORCH_ADAM = "torch.Adam"
    """torch.optim.Adam: as Adam, and delta is added to the corrected root."""
    ADAMW = "AdamW"
    """torch.optim.AdamW: as torch.Adam, and the decay multiplies the value."""
    LION = "Lion"
    """The sign of a moment that leads the history: Chen et al., 2023."""
    MUON = "Muon"
    """torch.optim.Muon: momentum whose matrix is orthogonalized."""
    MEAN = "Mean"
    """The value becomes the mean gradient, for optimizers that run on the workers."""

    @property
    def decouples_decay(self) -> bool:
        """Whether the decay multiplies the value, w <- w - rate decay w; otherwise the gradient of
        a penalty is added to g.
        """
        return self in (RuleKind.ADAMW, RuleKind.LION, RuleKind.MUON)


class Regularization(Enum):
    """The penalty whose gradient is added to each gradient (`regularization_type`)."""

    L2 = "L2"
    """decay * w."""
    L1 = "L1"
    """decay * sign(w)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewtonSchulz:
    """The iteration by which Muon orthogonalizes a table: X <- a X + (b A + c A A) X, A = X X^T.

    Args:
        columns: of the matrix that the table is; > 0. Its rows are whole.
        coefficients: a, b and c.
        steps: number of iterations; 0 to 99.
        rate_factor: multiplies the rate of the orthogonal matrix, but not of the decay (torch's
            `adjust_lr_fn`).
    """

    columns: int
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    steps: int = 5
    rate_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.columns < 1:
            raise SpecError(f"columns is {self.columns}; expected 1 or more")
        if not 0 <= self.steps < MAX_NEWTON_SCHULZ_STEPS:
            raise SpecError(
                f"ns_steps is {self.steps}; expected 0 to {MAX_NEWTON_SCHULZ_STEPS - 1}"
            )
        if not all(map(math.isfinite, (*self.coefficients, self.rate_factor))):
            raise SpecError(
                f"ns_coefficients are {self.coefficients}; expected three finite numbers"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one table's values follow from its gradients.

    Args:
        kind: the update rule.
        momentum: m of SGD, Nesterov, AdaDelta and Muon, beta1 of Adam and Lion; 0 <= m < 1.
        momentum2: beta2 of Adam and Lion; 0 <= m < 1.
        delta: the small constant of the adaptive rules, and the least norm of Muon; >= 0.
        rms_decay: the window of RMSProp; 0 <= d < 1.
        decay: weight decay of this table (Caffe: weight_decay * decay_mult).
        regularization: the penalty that `decay` weighs.
        rate_factor: multiplies the rate of each push (Caffe: lr_mult).
        dampening: of torch.SGD, from its second step on.
        nesterov: Nesterov's momentum, of torch.SGD and Muon.
        matrix: of Muon alone, which needs one. Such a table is one chunk.
    """

    kind: RuleKind = RuleKind.SGD
    momentum: float = 0.0
    momentum2: float = 0.999
    delta: float = 1e-8
    rms_decay: float = 0.99
    decay: float = 0.0
    regularization: Regularization = Regularization.L2
    rate_factor: float = 1.0
    dampening: float = 0.0
    nesterov: bool = False
    matrix: NewtonSchulz | None = None

    def __post_init__(self) -> None:
        for name in ("momentum", "momentum2", "rms_decay"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise SpecError(f"{name} is {value}; expected 0 <= {name} < 1")
        for name in ("delta", "decay", "rate_factor", "dampening"):
            if not math.isfinite(getattr(self, name)):
                raise SpecError(f"{name} is {getattr(self, name)}; expected a finite number")
        if (self.kind is RuleKind.MUON) != (self.matrix is not None):
            raise SpecError(
                f"the rule {self.kind.value} has {'no' if self.matrix is None else 'a'} matrix; "
                "expected one for Muon, and for no other rule"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """One parameter tensor, flat.

    Args:
        name: for error messages; need not be unique.
        size: number of float32 elements; > 0.
        staleness: the bound s >= 0 of its reads. 0: the shard applies the rule to the workers'
            average gradient. > 0: each worker applies the rule and the shard adds the changes.
        rows: number of equal pieces to cut the table into; 0: pieces of up to `CHUNK_ELEMENTS`
            (`placement.chunk_elements`). A rule of a matrix sees the table whole: one piece.
        rule: how values follow from gradients.
        keeping: what its next value is made of. Limit and scale of gradients are for `GRADIENTS`
            only.
        codec: of its gradients and of the changes of its values on the wire; None: the store's
            precision. Only tables whose rule runs on the shards have one.
        parts: sizes of the tensors that share the table; empty: it holds one. Such a table is one
            piece.
        row_elements: elements of a row, of a matrix whose gradients have few rows that are not
            zero; 0: it has none. See `StoreSpec.packs_rows`.
        held_as: what workers hold: their gradients, and the value, which is the shards' rounded.
            Shards hold float32. Only tables whose rule runs on the shards may differ.
        plane: whose workers share the table (`seats.py`): they push it and get its values. The one
            of host 0 gives the first value.
    """

    name: str
    size: int
    staleness: int = 0
    rows: int = 0
    rule: Rule = field(default_factory=Rule)
    keeping: Keeping = Keeping.GRADIENTS
    codec: CodecPair | None = None
    parts: tuple[int, ...] = ()
    row_elements: int = 0
    held_as: Precision = Precision.FLOAT32
    plane: int = 0

    @property
    def follows_gradients(self) -> bool:
        """Whether the shards apply the rule to gradients here, whose norm may be limited."""
        return self.staleness == 0 and self.keeping is Keeping.GRADIENTS

    @property
    def gradient_codec(self) -> Codec | None:
        """The codec of what workers push; None: the store's precision."""
        return None if self.codec is None else self.codec.gradients

    @property
    def value_codec(self) -> Codec | None:
        """The codec of what the shards send back; None: the store's precision."""
        return None if self.codec is None else self.codec.values

    @property
    def has_own_value(self) -> bool:
        """Whether the shards' value differs from the workers': a snapshot has both."""
        return self.value_codec is not None or self.held_as is not Precision.FLOAT32

    @property
    def is_whole(self) -> bool:
        """Whether it is one chunk: its rule sees a matrix, or several tensors share it."""
        return self.rule.matrix is not None or bool(self.parts)

    @property
    def may_skip(self) -> bool:
        """Whether all workers together may leave its value as it is for an iteration:
        of a mean, which nothing follows from.
        """
        return self.rule.kind is RuleKind.MEAN

    @property
    def adds_changes(self) -> bool:
        """Whether the shards add changes that the workers have made of their own gradients."""
        return self.staleness > 0 and self.keeping is not Keeping.COPY

    def __post_init__(self) -> None:
        if not 0 < self.size <= MAX_TABLE_ELEMENTS:
            raise SpecError(
                f"table '{self.name}' has size {self.size}; expected 1 to {MAX_TABLE_ELEMENTS}"
            )
        if not 0 <= self.staleness < MAX_CLOCK:
            raise SpecError(
                f"table '{self.name}' has staleness {self.staleness}; expected 0 to {MAX_CLOCK - 1}"
            )
        if self.staleness and self.rule.kind is RuleKind.MEAN:
            raise SpecError(f"table '{self.name}' is a mean, which has no staleness; expected 0")
        if self.codec is not None and not self.follows_gradients:
            raise SpecError(
                f"table '{self.name}' has the codec {self.codec}; expected none at staleness > 0, "
                "for averages and for copies"
            )
        if self.held_as is not Precision.FLOAT32 and (
            self.codec is not None or not self.follows_gradients or self.may_skip
        ):
            raise SpecError(
                f"table '{self.name}' is {self.held_as.value} on the workers; expected float32 at "
                "staleness > 0, for averages, means and copies, and with a codec"
            )
        if self.parts and (min(self.parts) < 1 or sum(self.parts) != self.size):
            raise SpecError(
                f"table '{self.name}' has parts {self.parts!r:.80}; expected sizes that add up to "
                f"{self.size}"
            )
        if not 0 <= self.row_elements <= self.size:
            raise SpecError(
                f"table '{self.name}' has rows of {self.row_elements} elements; expected 1 to "
                f"{self.size}, or 0 for none"
            )
        if self.rows < 0:
            raise SpecError(
                f"table '{self.name}' has {self.rows} rows; expected 1 or more, or 0 for the "
                "default"
            )
        if self.rule.matrix is not None and self.size % self.rule.matrix.columns:
            raise SpecError(
                f"table '{self.name}' has {self.size} elements; expected whole rows of "
                f"{self.rule.matrix.columns} columns"
            )


def _difference_of_tables(mine: Sequence[TableSpec], others: Sequence[TableSpec]) -> str:
    if len(mine) != len(others):
        return f"has {len(others)} tables; the first worker has {len(mine)}"
    first, other = next(pair for pair in zip(mine, others, strict=True) if pair[0] != pair[1])
    if first.name != other.name:
        return f"has table '{other.name}'; the first worker has '{first.name}' in its place"
    field = next(
        name for name in TableSpec.__slots__ if getattr(first, name) != getattr(other, name)
    )
    return (
        f"has table '{other.name}' with {field} {getattr(other, field)}; the first worker has "
        f"{getattr(first, field)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """Everything that workers and shards must agree on.

    Args:
        workers: number of workers W; their ranks are 0..W-1.
        shards: number of shards.
        tables: the tables; a table's id is its index here.
        consistency: how values travel to the workers.
        clip: largest allowed L2 norm over all tables' average gradients together (Caffe:
            clip_gradients); None: no limit. Only gradients that the shards apply are limited here.
        gradient_scale: multiplies the average gradient after the limit (Caffe: 1 / iter_size).
        start_clock: the clock of the initial values; > 0 when a run is resumed.
        loads: relative load that each shard is to carry, one whole number > 0 a shard; empty: all
            alike.
        chunks: least chunks that a shard's part is cut into, as `placement.chunk_elements` says; > 0.
            1: all is on one machine, where some shards may get no tables.
        outside_norm: planes whose workers apply gradients among themselves that count for `clip`,
            too: their workers on host 0 add the sums of squares, and all their workers get the
            total (`Client.add_norm`, `Client.total_norm`).
        precision: of gradients and values on the wire, in tables without a codec.
        trial: the store measures the shards before training. Each table has a clock of its own
            (`Client`), and after pushes the workers may replace it with another store
            (`Client.replace_trial`).
        virtual_workers: how many each host computes for; None: one. More need staleness 0.
        quorum: workers that end a round (`quorum.py`), below W; 0: all, in every iteration. It needs
            float32 without codecs, SSPPush, staleness 0, no limit, one virtual worker each, and
            one worker a host.
        grace_s: seconds to wait for others once a quorum is there.
        hosts: number of workers of each host, whose ranks follow one another (`seats.py`); empty:
            one on each.
    """

    workers: int
    shards: int
    tables: tuple[TableSpec, ...]
    consistency: Consistency = Consistency.SSP_PUSH
    clip: float | None = None
    gradient_scale: float = 1.0
    start_clock: int = 0
    loads: tuple[int, ...] = ()
    chunks: int = CHUNKS_A_SHARD
    outside_norm: tuple[int, ...] = ()
    precision: Precision = Precision.FLOAT32
    trial: bool = False
    virtual_workers: VirtualWorkers | None = None
    quorum: int = 0
    grace_s: float = 0.0
    hosts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise SpecError(f"workers is {self.workers}; expected 1 to {MAX_WORKERS}")
        if not 1 <= self.shards <= MAX_WORKERS:
            raise SpecError(f"shards is {self.shards}; expected 1 to {MAX_WORKERS}")
        if len(self.tables) > MAX_TABLES:
            raise SpecError(f"there are {len(self.tables)} tables; expected at most {MAX_TABLES}")
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise SpecError(f"clip is {self.clip}; expected a number above 0")
        if not (math.isfinite(self.gradient_scale) and self.gradient_scale > 0):
            raise SpecError(f"gradient_scale is {self.gradient_scale}; expected a number above 0")
        if self.loads and (len(self.loads) != self.shards or min(self.loads) < 1):
            raise SpecError(
                f"loads are {self.loads}; expected {self.shards} whole numbers above 0, or none"
            )
        if not 1 <= self.chunks < 2**31:
            raise SpecError(f"chunks is {self.chunks}; expected 1 to {2**31 - 1}")
        half = next((t for t in self.tables if t.held_as is not Precision.FLOAT32), None)
        if half is not None and self.precision is not Precision.FLOAT32:
            raise SpecError(
                f"table '{half.name}' is {half.held_as.value} on the workers, which needs the "
                f"precision float32, not {self.precision.value}"
            )
        lossy = next((table for table in self.tables if table.codec is not None), None)
        if lossy is not None and self.consistency is not Consistency.SSP_PUSH:
            raise SpecError(
                f"table '{lossy.name}' has the codec {lossy.codec}, which needs SSPPush, not "
                f"{self.consistency.value}"
            )
        if not 0 <= self.start_clock < MAX_CLOCK:
            raise SpecError(f"start_clock is {self.start_clock}; expected 0 to {MAX_CLOCK - 1}")
        self._check_planes()
        self._check_virtual_workers()
        self._check_quorum()

    def _check_planes(self) -> None:
        planes = self.seats.planes
        other = next((table for table in self.tables if not 0 <= table.plane < planes), None)
        if other is not None:
            raise SpecError(
                f"table '{other.name}' belongs to plane {other.plane}; expected a number below "
                f"{planes}, the workers of the smallest host"
            )
        outside = [plane for plane in range(planes) if plane in self.outside_norm]
        if tuple(outside) != self.outside_norm:
            raise SpecError(
                f"outside_norm is {self.outside_norm}; expected planes below {planes}, in "
                "order, each once"
            )

    def _check_quorum(self) -> None:
        if not (self.grace_s >= 0 and math.isfinite(self.grace_s)):
            raise SpecError(f"grace_s is {self.grace_s}; expected 0 or more")
        if not self.quorum:
            return
        if not 1 <= self.quorum < self.workers:
            raise SpecError(f"quorum is {self.quorum}; expected 1 to {self.workers - 1}, or 0")
        plain = (
            self.consistency is Consistency.SSP_PUSH
            and self.precision is Precision.FLOAT32
            and self.clip is None
            and not self.trial
            and self.placed.is_one_each
            and not self.hosts
        )
        if not plain or any(
            table.staleness or table.codec or table.held_as is not Precision.FLOAT32
            for table in self.tables
        ):
            raise SpecError(
                f"a quorum of {self.quorum} workers needs SSPPush, staleness 0, float32 without "
                "codecs, no clip, one virtual worker each, and one worker a host"
            )

    def _check_virtual_workers(self) -> None:
        of = self.virtual_workers
        if of is None or (of.is_one_each and of.processes == self.seats.host_count):
            return
        if of.processes != self.seats.host_count or of.count > MAX_WORKERS:
            raise SpecError(
                f"{of.count} virtual workers are placed on {of.processes} hosts; expected at "
                f"most {MAX_WORKERS}, on {self.seats.host_count} hosts"
            )
        if stale := next((table for table in self.tables if table.staleness), None):
            raise SpecError(
                f"table '{stale.name}' has staleness {stale.staleness}, and hosts compute for "
                "several virtual workers each; expected staleness 0"
            )

    @property
    def seats(self) -> Seats:
        """The seats of the workers. The members of a plane own its tables."""
        return seats_of(self.hosts, self.workers)

    @property
    def placed(self) -> VirtualWorkers:
        """The virtual workers, and the hosts that compute for them."""
        return self.virtual_workers or VirtualWorkers.one_each(self.seats.host_count)

    def nodes(self, table: TableSpec, host: int) -> tuple[Node, ...]:
        """Return the nodes whose sums a host's worker pushes to a table in an iteration, one after
        another.

        What is encoded or rounded is held back by each virtual worker, so each is pushed by itself.
        """
        return self.placed.nodes(host, leaves=self.is_lossy(table))

    def is_lossy(self, table: TableSpec) -> bool:
        """Return whether pushes to a table are encoded or rounded."""
        rounded = self.precision is not Precision.FLOAT32 and table.keeping is Keeping.GRADIENTS
        return table.gradient_codec is not None or rounded

    def packs_rows(self, table: TableSpec) -> bool:
        """Return whether pushes and values of a table leave out rows (`packed_rows.py`): gradients
        and values of float32 at staleness 0, which are sent to all workers in each iteration.
        """
        return (
            table.row_elements > 0
            and table.follows_gradients
            and table.codec is None
            and table.held_as is Precision.FLOAT32
            and self.precision is Precision.FLOAT32
            and self.consistency is not Consistency.SSP
            and not self.quorum
        )

    def difference(self, other: StoreSpec) -> str:
        """Return the first difference of another worker's store from this one:
        the end of a sentence about that worker.
        """
        for name in self.__slots__:
            mine, others = getattr(self, name), getattr(other, name)
            if mine != others and name == "tables":
                return (
                    f"{_difference_of_tables(mine, others)}; all workers must have the same tensors"
                )
            if mine != others:
                return f"has {name} {others}; the first worker has {mine}"
        return "agrees"
