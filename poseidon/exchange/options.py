"""The options of a job's exchange: parsed and checked once, and passed whole from the flags to
the store.

Law: an option is a field here, which declares its flag. Nothing between the flag and the store
names it, and the command line reads it without torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from poseidon.errors import UsageError, counted
from poseidon.flags.flag import Section, flag_of, option, title_of
from poseidon.flags.values import count, positive
from ps_server import Consistency, Precision
from ps_server.protocol.settings import MAX_WORKERS
from ps_server.protocol.virtual_workers import VirtualWorkers

if TYPE_CHECKING:
    from poseidon.exchange.lossy.compression import Auto, Compression


def _option(default: Any, text: str, /, **settings: Any) -> Any:
    return option(default, text, Section.EXCHANGE, **settings)


def _of_rounds(default: Any, text: str, /, **settings: Any) -> Any:
    return option(default, text, Section.ROUNDS, of="local_steps=", **{"metavar": "X", **settings})


POWERSGD_IN_PARTS = (
    "--compress=powersgd cannot be combined with fragments and delay of --local_steps; use a "
    "different compression, or leave these out"
)


class Scheme(Enum):
    """How one tensor is exchanged."""

    SERVER = "ps"
    """Gradients go to the shards, values come back."""
    FACTORS = "svb"
    """The two factors of the gradient go to every other worker."""
    ALLREDUCE = "allreduce"
    """A sum over all workers, through their own connections."""
    LOCAL = "local"
    """Nothing leaves the process."""


class ExchangeKind(Enum):
    """The exchange of a job (`--exchange`), which decides the scheme of each tensor."""

    AUTO = "auto"
    """The fastest of server, factors and all-reduce, tensor by tensor, by a measurement."""
    HYBRID = "hybrid"
    """The cheaper of server and factors, tensor by tensor."""
    SERVER = "ps"
    """Every tensor to the server."""
    FACTORS = "svb"
    """Every fully-connected weight as factors, the rest to the server."""
    ALLREDUCE = "allreduce"
    """Every tensor by all-reduce; no shards."""
    LOCAL = "local"
    """One worker, no network."""

    @property
    def sends_factors(self) -> bool:
        """Whether weights may travel as factors."""
        return self in (ExchangeKind.AUTO, ExchangeKind.HYBRID, ExchangeKind.FACTORS)

    @property
    def has_shards(self) -> bool:
        """Whether tensors may go to shards."""
        return self not in (ExchangeKind.ALLREDUCE, ExchangeKind.LOCAL)


class OnDivergence(Enum):
    """The effect of a difference between replicas."""

    STOP = "stop"
    """It ends the job."""
    MEND = "mend"
    """Rank 0's values go to all workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeOptions:
    """The options of an exchange, the same on every worker.

    Attributes:
        kind: decides the scheme of each tensor.
        staleness: the bound of every table, in iterations; at least 0.
        rows: pieces to cut each table into; 0: pieces of up to 2 MiB.
        consistency: when values are sent.
        precision: of gradients and values on the wire.
        local_steps: iterations of a round of local steps (`rounds/local_steps.py`);
            0: workers exchange in every iteration.
        outer_lr: rate of the outer rule, above 0.
        outer_momentum: momentum of the outer rule, at least 0 and below 1.
        outer_nesterov: whether the outer rule is Nesterov's; otherwise it is SGD.
        sync_fragments: parts of the tensors that are exchanged at different
            iterations of a round (`rounds/local_steps.py`).
        sync_delay: local steps that are made while a part travels; below `local_steps`.
        sync_mix: the weight of a worker's own value when the common one comes after a delay; at
            least 0 and below 1.
        quorum: workers whose changes end a round, at least 1 (`rounds/quorum.py`); 0, or as many as
            there are: all.
        quorum_grace: seconds that a round then waits for others.
        bandwidth_mbps: SSPAggr's budget of each client for changes that the bound does not need
            yet; None: no limit.
        compress: how tensors are compressed (`lossy/compression.py`); empty: none.
        loss_budget: of `auto` (`lossy/compression.py`); None: there is none.
        wait_free: whether gradients leave while the backward pass runs.
        check_replicas: iterations between comparisons of the replicas; 0: they are never compared.
        on_divergence: the effect of a difference.

    Raises:
        UsageError: a number is out of range, or two options exclude each other; the text names
            their flags.
    """

    kind: ExchangeKind = _option(
        ExchangeKind.AUTO, "{choices}", name="exchange", metavar="KIND", default=None
    )
    staleness: int = _option(
        0,
        "iterations, or rounds, that workers may be apart ({default})",
        aliases=("table_staleness",),
        metavar="S",
        read=count,
    )
    rows: int = _option(
        0,
        "pieces of a tensor; {default} (default): by size",
        aliases=("num_rows_per_table",),
        read=count,
        rare=True,
    )
    consistency: Consistency = _option(
        Consistency.SSP_PUSH,
        "SSP (pull), SSPPush (push), SSPAggr",
        aliases=("consistency_model",),
        metavar="NAME",
        instead={"bsp": "--consistency=SSPPush --staleness=0"},
        rare=True,
    )
    bandwidth_mbps: float | None = _option(
        None,
        "Mbit/s of a client for changes sent early (SSPAggr)",
        aliases=("client_bandwidth_mbps",),
        metavar="F",
        read=positive,
        rare=True,
    )
    precision: Precision = _option(
        Precision.FLOAT32, "{choices}", name="wire_precision", metavar="TYPE", rare=True
    )
    compress: str = _option(
        "", "lossy compression: int8, 'fc*=topk:0.01'; see docs", metavar="SCHEMES"
    )
    loss_budget: float | None = _option(
        None,
        "--compress=auto: largest share of loss, as 0.01",
        metavar="F",
        read=positive,
        rare=True,
    )
    local_steps: int = option(
        0,
        "steps between exchanges; {default} (default): none",
        Section.ROUNDS,
        metavar="H,...",
        read=count,
    )
    outer_lr: float = _of_rounds(0.7, "rate of the outer rule ({default})")
    outer_momentum: float = _of_rounds(0.9, "its momentum ({default})")
    outer_nesterov: bool = _of_rounds(True, "true or false: its momentum is Nesterov's ({default})")
    sync_fragments: int = _of_rounds(
        1, "parts sent at different iterations of a round ({default})", name="fragments", read=count
    )
    sync_delay: int = _of_rounds(
        0, "local steps made while a part travels ({default})", name="delay", read=count
    )
    sync_mix: float = _of_rounds(
        0.5, "weight of the own value after a delay ({default})", name="mix"
    )
    quorum: int = _of_rounds(0, "workers that end a round; {default} (default): all", read=count)
    quorum_grace: float = _of_rounds(
        0.0, "seconds that it then waits for the others ({default})", name="grace"
    )
    wait_free: bool = _option(
        True, "send gradients during the backward pass ({default})", rare=True
    )
    check_replicas: int = _option(
        1000, "iterations between comparisons of weights ({default})", read=count, rare=True
    )
    on_divergence: OnDivergence = _option(
        OnDivergence.STOP, "weights differ: {choices}", metavar="WHAT", rare=True
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, int) and value < 0:
                flag = title_of(self, entry.name)
                raise UsageError(f"{flag}={value}: expected 0 or more")
        if self.kind is ExchangeKind.ALLREDUCE:
            self._require("--exchange=allreduce", "staleness", "precision")
        if self.bandwidth_mbps is not None and self.consistency is not Consistency.SSP_AGGR:
            raise UsageError(
                f"--bandwidth_mbps is for --consistency=SSPAggr, not {self.consistency.value}"
            )
        if self._compressions():
            if self.kind is ExchangeKind.ALLREDUCE:
                raise UsageError(
                    "--compress needs the parameter server: --exchange=hybrid, ps or svb, not allreduce"
                )
            self._require("--compress", "staleness", "consistency", "precision")
            if self.streams and self.names_powersgd:
                raise UsageError(POWERSGD_IN_PARTS)
        self._check_local_steps()

    def _others(self, names: Collection[str]) -> Iterator[tuple[str, str, str]]:
        """Yield the flag, value and default of each of these options that differs from its default."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value != entry.default and entry.name in names:
                yield title_of(self, entry.name), _text(value), _text(entry.default)

    def _require(self, what: str, *names: str) -> None:
        for flag, value, default in self._others(names):
            raise UsageError(f"{what} needs {flag}={default}, not {value}")

    def _check_local_steps(self) -> None:
        if self.local_steps and self.kind is ExchangeKind.FACTORS:
            raise UsageError(
                f"--local_steps={self.local_steps} cannot be combined with --exchange=svb: the "
                "sum of several iterations' changes has no factors; use hybrid, ps or allreduce"
            )
        if not (self.outer_lr > 0 and math.isfinite(self.outer_lr)):
            raise UsageError(f"--local_steps=outer_lr={self.outer_lr:g}: expected a number above 0")
        for name in ("outer_momentum", "sync_mix"):
            if not 0 <= (share := getattr(self, name)) < 1:
                flag = title_of(ExchangeOptions, name)
                raise UsageError(f"{flag}={share:g}: expected 0 or more, and less than 1")
        if not self.local_steps:
            for flag, *_ in self._others(LOCAL_STEPS):
                raise UsageError(f"{flag} needs local steps: give --local_steps=H too")
            return
        if not 1 <= self.sync_fragments <= self.local_steps:
            raise UsageError(
                f"--local_steps={self.local_steps},fragments={self.sync_fragments}: expected 1 to "
                f"{self.local_steps} fragments"
            )
        if self.sync_delay >= self.local_steps:
            raise UsageError(
                f"--local_steps={self.local_steps},delay={self.sync_delay}: expected a delay of less than "
                f"{self.local_steps}"
            )
        self._check_quorum()
        if self.streams and (self.kind is ExchangeKind.ALLREDUCE or self.staleness):
            raise UsageError(
                "fragments and delay of --local_steps need the parameter server at --staleness=0; "
                "use --exchange=hybrid or ps"
            )

    def _check_quorum(self) -> None:
        if not (self.quorum_grace >= 0 and math.isfinite(self.quorum_grace)):
            raise UsageError(
                f"--local_steps=grace={self.quorum_grace:g}: expected a number of seconds, 0 or more"
            )
        if not self.quorum:
            if self.quorum_grace:
                raise UsageError(
                    f"--local_steps=grace={self.quorum_grace:g} needs a quorum: give quorum=K too"
                )
            return
        others = [
            *(["--exchange=allreduce"] if self.kind is ExchangeKind.ALLREDUCE else []),
            *(["fragments and delay"] if self.streams else []),
            *(
                f"{flag}={value}"
                for flag, value, _ in self._others(["staleness", "precision", "consistency"])
            ),
            *([f"--compress={self.compress}"] if self._compressions() else []),
        ]
        for refused in others:
            raise UsageError(
                f"--local_steps=quorum={self.quorum} cannot be combined with {refused}: it needs whole rounds "
                "in float32 through the parameter server"
            )

    def check_quorum(self, placed: VirtualWorkers) -> None:
        """Raise UsageError when a job cannot begin with this quorum.

        Args:
            placed: the virtual workers, and the workers that compute for them.
        """
        if self.quorum > placed.processes:
            raise UsageError(
                f"--local_steps=quorum={self.quorum}: expected at most {placed.processes}, the number of workers"
            )
        if self.quorum and not placed.is_one_each:
            raise UsageError(
                f"--local_steps=quorum={self.quorum} cannot be combined with "
                f"{counted(placed.count, 'virtual worker')} on "
                f"{counted(placed.processes, 'worker')}; use --virtual_workers={placed.processes}, "
                "or leave it out"
            )

    def of_workers(self, placed: VirtualWorkers) -> ExchangeOptions:
        """Return the options of a job: a quorum of all is none. Nor is there one while a worker
        computes for several virtual workers, after the loss of a worker.
        """
        if self.quorum < placed.processes and placed.is_one_each:
            return self
        return replace(self, quorum=0, quorum_grace=0.0)

    def check_ddp(self) -> None:
        """Raise UsageError when gradients of DistributedDataParallel cannot be exchanged so: they
        are means of one step, which every worker waits for.
        """
        for name, instead in (
            ("staleness", "poseidon.distribute with a rule, such as poseidon.SGD"),
            ("local_steps", "poseidon.distribute(..., local_steps=H)"),
        ):
            if value := getattr(self, name):
                flag = title_of(ExchangeOptions, name)
                raise UsageError(
                    f"{flag}={value} cannot be combined with DistributedDataParallel, whose "
                    f"gradients are the mean over all workers in each step; leave out {flag}, or "
                    f"use {instead}"
                )

    def first_given(self) -> str:
        """Return the first option that is not as by default, as a flag with its value; empty: all
        are.
        """
        given = self._others([entry.name for entry in fields(self)])
        return next((f"{flag}={value}" for flag, value, _ in given), "")

    def check_workers_per_host(self, count: int) -> None:
        """Raise UsageError when this many workers on each host cannot exchange so."""
        if self.quorum and count > 1:
            raise UsageError(
                f"--local_steps=quorum={self.quorum} needs one worker on each host, not {count}: the workers "
                "of a host send one sum"
            )
        if self.streams and count > 1:
            raise UsageError(
                f"fragments and delay of --local_steps need one worker on each host, not {count}: "
                "the workers of a host exchange all tensors together"
            )

    @property
    def is_encoded(self) -> bool:
        """Whether gradients or values lose bits on the wire."""
        return bool(self._compressions()) or self.precision is not Precision.FLOAT32

    @property
    def packs_rows(self) -> bool:
        """Whether shards and workers leave out rows without a change (`StoreSpec.packs_rows`)."""
        exact = self.precision is Precision.FLOAT32 and self.consistency is not Consistency.SSP
        return exact and self.staleness == 0

    @property
    def names_powersgd(self) -> bool:
        """Whether `compress` has PowerSGD as one of its schemes; `auto` may choose it too."""
        from poseidon.exchange.lossy.low_rank_matrix import LowRank  # it imports torch

        return any(isinstance(each, LowRank) for each in self._compressions())

    def _compressions(self) -> list[Compression | Auto]:
        """Return the compressions that `compress` names.

        Raises:
            UsageError: `compress` is not legal, or it has no `auto` that uses the loss budget.
        """
        if not self.compress and self.loss_budget is None:
            return []
        from poseidon.exchange.lossy.compression import parse_compression  # it imports torch

        schemes = parse_compression(self.compress, self.loss_budget)
        return [scheme.compression for scheme in schemes if scheme.compression is not None]

    @property
    def chooses(self) -> bool:
        """Whether workers choose the scheme of each tensor by time; else `auto` does what `hybrid`
        does.
        """
        plain = self.staleness == 0 and self.local_steps == 0
        return self.kind is ExchangeKind.AUTO and plain and self.precision is Precision.FLOAT32

    @property
    def keeps_schemes(self) -> bool:
        """Whether later starts and resumed runs keep the scheme of each tensor."""
        return self.chooses or self.kind is ExchangeKind.HYBRID

    @property
    def streams(self) -> bool:
        """Whether parts of the tensors travel at different iterations, or while local steps are
        made.
        """
        return self.sync_fragments > 1 or self.sync_delay > 0

    @property
    def most_lead(self) -> int | None:
        """The most iterations that a worker is ahead of the slowest one as it begins an iteration;
        None: no bound.
        """
        if self.quorum:
            return None
        return (self.staleness + 1) * max(self.local_steps, 1) - 1 + self.sync_delay

    @property
    def without_local_steps(self) -> ExchangeOptions:
        """The options of the outer exchange."""
        unused: dict[str, Any] = {
            entry.name: entry.default for entry in fields(self) if entry.name in LOCAL_STEPS
        }
        return replace(self, local_steps=0, **unused)

    @property
    def one_plain_step(self) -> bool:
        """Whether a round is one step, and the outer rule takes the mean over the workers as it
        is.
        """
        plain = self.outer_lr == 1 and self.outer_momentum == 0 and not self.quorum
        return self.local_steps == 1 and plain

    @property
    def check_interval(self) -> int:
        """`check_replicas`; with local steps the next multiple of `local_steps`, where
        the workers have equal values anyhow.
        """
        if not self.local_steps:
            return self.check_replicas
        return -(-self.check_replicas // self.local_steps) * self.local_steps


LOCAL_STEPS = frozenset(
    entry.name for entry in fields(ExchangeOptions) if (flag := flag_of(entry)) and flag.of
)
"""The options that only local steps use."""
DEFAULT_OPTIONS = ExchangeOptions()


def _text(value: object) -> str:
    """Return the value of an option as it is given."""
    return str(value.value if isinstance(value, Enum) else value)


def check_virtual_workers(placed: VirtualWorkers | None, options: ExchangeOptions) -> None:
    """Refuse what virtual workers cannot do.

    Args:
        placed: the virtual workers, and the workers that compute for them; None: one each, and bits
            may depend on the cluster.

    Raises:
        UsageError: says what, and what was expected.
    """
    if placed is None:
        return
    if placed.count > MAX_WORKERS:
        raise UsageError(f"{placed.count} virtual workers: expected at most {MAX_WORKERS}")
    virtual = f"{counted(placed.count, 'virtual worker')} on {counted(placed.processes, 'worker')}"
    if options.staleness and not placed.is_one_each:
        raise UsageError(
            f"{virtual} cannot be combined with --staleness={options.staleness}, whose bits depend "
            f"on the order of arrival; use --virtual_workers={placed.processes}, or leave it out"
        )
