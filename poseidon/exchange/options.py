"""The options of a job's exchange: parsed and checked once, and passed whole from the flags to
the store.

Law: an option is a field here and a flag in `poseidon/cli/parsers/jobs.py`, whose name the field
gives. Nothing between the two names it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from poseidon.errors import UsageError
from poseidon.exchange.kinds import ExchangeKind
from poseidon.exchange.lossy.compression import parse_compression
from poseidon.exchange.lossy.low_rank_matrix import LowRank
from ps_server import Consistency, Precision

LOCAL_STEPS = frozenset(
    {"outer_lr", "outer_momentum", "outer_nesterov", "sync_fragments", "sync_delay", "sync_mix"}
)
"""The options that only local steps use."""


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
        allreduce_in_clear: whether all-reduce may run in a job that encrypts.
        staleness: the bound of every table, in iterations; at least 0.
        rows: pieces to cut each table into; 0: pieces of up to 2 MiB.
        consistency: when values are sent.
        precision: of gradients and values on the wire.
        sync_every: iterations of a round of local steps (`rounds/local_steps.py`);
            0: workers exchange in every iteration.
        outer_lr: rate of the outer rule, above 0.
        outer_momentum: momentum of the outer rule, at least 0 and below 1.
        outer_nesterov: whether the outer rule is Nesterov's; otherwise it is SGD.
        sync_fragments: parts of the tensors that are exchanged at different
            iterations of a round (`rounds/local_steps.py`).
        sync_delay: local steps that are made while a part travels; below `sync_every`.
        sync_mix: the weight of a worker's own value when the common one comes after a delay; at
            least 0 and below 1.
        bandwidth_mbps: SSPAggr's budget of each client for changes that the bound does not need
            yet; None: no limit.
        compress: lossy codecs of tensors (`lossy/compression.py`); empty: none.
        loss_budget: of the codec `auto` (`lossy/automatic.py`); None: there is none.
        wait_free: whether gradients leave while the backward pass runs.
        check_every: iterations between comparisons of the replicas; 0: they are never compared.
        on_divergence: the effect of a difference.

    Raises:
        UsageError: a number is out of range, or two options exclude each other; the text names
            their flags.
    """

    kind: ExchangeKind = field(default=ExchangeKind.HYBRID, metadata={"flag": "exchange"})
    allreduce_in_clear: bool = field(default=False, metadata={"flag": "allreduce_in_clear"})
    staleness: int = field(default=0, metadata={"flag": "table_staleness"})
    rows: int = field(default=0, metadata={"flag": "num_rows_per_table"})
    consistency: Consistency = field(
        default=Consistency.SSP_PUSH, metadata={"flag": "consistency_model"}
    )
    precision: Precision = field(default=Precision.FLOAT32, metadata={"flag": "wire_precision"})
    sync_every: int = field(default=0, metadata={"flag": "sync_every"})
    outer_lr: float = field(default=0.7, metadata={"flag": "outer_lr"})
    outer_momentum: float = field(default=0.9, metadata={"flag": "outer_momentum"})
    outer_nesterov: bool = field(default=True, metadata={"flag": "outer_nesterov"})
    sync_fragments: int = field(default=1, metadata={"flag": "sync_fragments"})
    sync_delay: int = field(default=0, metadata={"flag": "sync_delay"})
    sync_mix: float = field(default=0.5, metadata={"flag": "sync_mix"})
    bandwidth_mbps: float | None = field(default=None, metadata={"flag": "client_bandwidth_mbps"})
    compress: str = field(default="", metadata={"flag": "compress"})
    loss_budget: float | None = field(default=None, metadata={"flag": "loss_budget"})
    wait_free: bool = field(default=True, metadata={"flag": "wait_free"})
    check_every: int = field(default=1000, metadata={"flag": "check_replicas"})
    on_divergence: OnDivergence = field(
        default=OnDivergence.STOP, metadata={"flag": "on_divergence"}
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, int) and value < 0:
                raise UsageError(f"--{entry.metadata['flag']}={value}: expected 0 or more")
        if self.kind is ExchangeKind.ALLREDUCE and self.staleness:
            raise UsageError(
                "--exchange=allreduce has no staleness; expected 0, not "
                f"--table_staleness={self.staleness}"
            )
        if self.kind is ExchangeKind.ALLREDUCE and self.precision is not Precision.FLOAT32:
            raise UsageError(
                f"--exchange=allreduce sends float32; expected that, not {self.precision.value}"
            )
        if self.bandwidth_mbps is not None and self.consistency is not Consistency.SSP_AGGR:
            raise UsageError(
                "--client_bandwidth_mbps is for --consistency_model=SSPAggr, not "
                f"{self.consistency.value}"
            )
        if any(
            scheme.codec is not None
            for scheme in parse_compression(self.compress, self.loss_budget)
        ):
            self._check_compressed()
        self._check_local_steps()

    def _check_local_steps(self) -> None:
        if self.sync_every and self.kind is ExchangeKind.FACTORS:
            raise UsageError(
                f"--sync_every={self.sync_every} sends what many iterations have changed, which "
                "has no factors; expected "
                "--exchange=hybrid, ps or allreduce, not svb"
            )
        if not (self.outer_lr > 0 and math.isfinite(self.outer_lr)):
            raise UsageError(f"--outer_lr={self.outer_lr:g}: expected a number above 0")
        if not 0 <= self.outer_momentum < 1:
            raise UsageError(
                f"--outer_momentum={self.outer_momentum:g}: expected 0 or more, and less than 1"
            )
        if not self.sync_every:
            for entry in fields(self):
                if entry.name in LOCAL_STEPS and getattr(self, entry.name) != entry.default:
                    raise UsageError(
                        f"--{entry.metadata['flag']} is for local steps, which --sync_every=H "
                        "asks for"
                    )
            return
        if not 1 <= self.sync_fragments <= self.sync_every:
            raise UsageError(
                f"--sync_fragments={self.sync_fragments}: expected 1 to {self.sync_every}, which "
                "is --sync_every"
            )
        if self.sync_delay >= self.sync_every:
            raise UsageError(
                f"--sync_delay={self.sync_delay}: expected less than --sync_every={self.sync_every}"
            )
        if not 0 <= self.sync_mix < 1:
            raise UsageError(f"--sync_mix={self.sync_mix:g}: expected 0 or more, and less than 1")
        if self.streams and (self.kind is ExchangeKind.ALLREDUCE or self.staleness):
            raise UsageError(
                "--sync_fragments and --sync_delay need the parameter server at "
                "--table_staleness=0; expected "
                "--exchange=hybrid or ps"
            )

    def check_workers_per_host(self, count: int) -> None:
        """Raise UsageError when this many workers on each host cannot exchange so."""
        if self.streams and count > 1:
            raise UsageError(
                f"--sync_fragments and --sync_delay need one worker on each host, not {count}: "
                "the workers of a host "
                "exchange all tensors together"
            )

    @property
    def names_powersgd(self) -> bool:
        """Whether `compress` has PowerSGD as one of its schemes; `auto` may choose it too."""
        return any(
            isinstance(scheme.codec, LowRank)
            for scheme in parse_compression(self.compress, self.loss_budget)
        )

    @property
    def streams(self) -> bool:
        """Whether parts of the tensors travel at different iterations, or while local steps are
        made.
        """
        return self.sync_fragments > 1 or self.sync_delay > 0

    @property
    def without_local_steps(self) -> ExchangeOptions:
        """The options of the outer exchange."""
        unused: dict[str, Any] = {
            entry.name: entry.default for entry in fields(self) if entry.name in LOCAL_STEPS
        }
        return replace(self, sync_every=0, **unused)

    @property
    def one_plain_step(self) -> bool:
        """Whether a round is one step, and the outer rule takes the mean over the workers as it
        is.
        """
        return self.sync_every == 1 and self.outer_lr == 1 and self.outer_momentum == 0

    @property
    def check_interval(self) -> int:
        """`check_every`; with local steps the next multiple of `sync_every`, where
        the workers have equal values anyhow.
        """
        if not self.sync_every:
            return self.check_every
        return -(-self.check_every // self.sync_every) * self.sync_every

    def _check_compressed(self) -> None:
        if self.kind is ExchangeKind.ALLREDUCE:
            raise UsageError(
                "--compress is for tensors that go through the parameter server; expected "
                "--exchange=hybrid, ps or svb, "
                "not allreduce"
            )
        if self.staleness:
            raise UsageError(f"--compress needs --table_staleness=0, not {self.staleness}")
        if self.consistency is not Consistency.SSP_PUSH:
            raise UsageError(
                f"--compress needs --consistency_model=SSPPush, not {self.consistency.value}"
            )
        if self.precision is not Precision.FLOAT32:
            raise UsageError(
                f"--compress needs --wire_precision=float32, not {self.precision.value}"
            )
        if self.streams and self.names_powersgd:
            raise UsageError(
                "--compress=powersgd takes two rounds through the shards for each exchange; "
                "expected another codec, or no "
                "--sync_fragments and --sync_delay"
            )

    @classmethod
    def from_flags(cls, flags: argparse.Namespace, *, kind: ExchangeKind) -> ExchangeOptions:
        """Return the options of a command line.

        Args:
            flags: has the flag of each field as an attribute.
            kind: the kind that --exchange and --svb give together.
        """
        given = {entry.name: getattr(flags, entry.metadata["flag"]) for entry in fields(cls)}
        return cls.from_json({**given, "kind": kind.value})

    def to_json(self) -> dict[str, object]:
        """Return values for `json.dumps`, by field."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {
            name: value.value if isinstance(value, Enum) else value
            for name, value in values.items()
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ExchangeOptions:
        """Return the options that `to_json` has encoded; missing fields have their defaults.

        Raises:
            UsageError: a field is unknown, or its value is of another type or none of its choices.
        """
        known = {entry.name: entry for entry in fields(cls)}
        if extra := ", ".join(sorted(values.keys() - known.keys())):
            raise UsageError(f"the exchange has no option {extra}")
        return cls(**{name: _read(known[name], value) for name, value in values.items()})


DEFAULT_OPTIONS = ExchangeOptions()


def _read(entry: Any, value: Any) -> Any:
    """Return a value of JSON as the field's type: that of its default, or a number where the
    default is None.
    """
    kind = type(entry.default)
    if isinstance(entry.default, Enum):
        try:
            return kind(value)
        except ValueError as error:
            choices = " or ".join(str(member.value) for member in type(entry.default))
            raise UsageError(
                f"--{entry.metadata['flag']} is {value!r}; expected {choices}"
            ) from error
    if entry.default is None:
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        raise UsageError(f"--{entry.metadata['flag']} is {value!r:.60}; expected a number")
    if type(value) is not kind:
        raise UsageError(f"--{entry.metadata['flag']} is {value!r:.60}; expected {kind.__name__}")
    return value
