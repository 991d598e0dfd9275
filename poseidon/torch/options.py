"""The arguments of `poseidon.distribute`, as one checked value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from poseidon.errors import UsageError
from poseidon.exchange.options import DEFAULT_OPTIONS
from poseidon.torch.factor_rows import Example


class RunsOn(Enum):
    """What applies the update rule of a torch.optim optimizer."""

    WORKERS = "workers"
    """The optimizer itself, on every worker."""
    SHARDS = "shards"
    """The shards: workers keep no state of the optimizer."""


class Buffers(Enum):
    """Treatment of the running statistics of normalization layers."""

    AVERAGE = "average"
    """After every step they are the mean over the workers."""
    OWN = "own"
    """Each worker keeps its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """The outer rule of local steps: m <- b m + g; w <- w - lr (g + b m), or w - lr m without
    Nesterov's momentum.

    g is the mean over the workers of what a round has subtracted from w. The
    defaults are DiLoCo's (Douillard et al., 2023).

    Args:
        lr: the rate; above 0.
        momentum: b; 0 <= b < 1.
        nesterov: Nesterov's momentum.
        fragments: parts of the parameters that are exchanged at different steps of a round; 1 to
            its steps.
        delay: local steps that are made while a part travels; 0 or more, less than the steps of a
            round.
        mix: the weight of a worker's own value when the common one comes after a delay; 0 <= mix <
            1.
        quorum: workers whose changes end a round; 0: all.
        grace: seconds that a round then waits for the others.
    """

    lr: float = DEFAULT_OPTIONS.outer_lr
    momentum: float = DEFAULT_OPTIONS.outer_momentum
    nesterov: bool = DEFAULT_OPTIONS.outer_nesterov
    fragments: int = DEFAULT_OPTIONS.sync_fragments
    delay: int = DEFAULT_OPTIONS.sync_delay
    mix: float = DEFAULT_OPTIONS.sync_mix
    quorum: int = DEFAULT_OPTIONS.quorum
    grace: float = DEFAULT_OPTIONS.quorum_grace

    def __post_init__(self) -> None:
        check_number("lr of Outer", self.lr)
        check_number("momentum of Outer", self.momentum)
        if not self.lr or self.momentum >= 1:
            raise UsageError(
                f"Outer has lr {self.lr} and momentum {self.momentum}; expected lr above 0 and "
                "momentum below 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributeOptions:
    """The arguments of `distribute`, which has their meaning.

    Raises:
        UsageError: one is out of range, or two exclude each other.
    """

    clip: float | None = None
    passes: int = 1
    buffers: Buffers = Buffers.AVERAGE
    on: RunsOn = RunsOn.WORKERS
    example: Example | None = None
    batch_size: int = 0
    compress: str = ""
    local_steps: int | None = None
    outer: Outer | None = None
    virtual_workers: int | None = None

    def __post_init__(self) -> None:
        if self.virtual_workers is not None and self.virtual_workers < 1:
            raise UsageError(
                f"virtual_workers is {self.virtual_workers}; expected 1 or more, or None for "
                "--virtual_workers"
            )
        if self.local_steps is not None and self.local_steps < 0:
            raise UsageError(
                f"local_steps is {self.local_steps}; expected 1 or more, 0 for none, or None for "
                "--local_steps"
            )
        if self.passes < 1:
            raise UsageError(f"passes is {self.passes}; expected 1 or more")
        if self.clip is not None and not self.clip > 0:
            raise UsageError(f"clip is {self.clip}; expected a number above 0, or None")
        if self.example is not None and self.batch_size:
            raise UsageError("give an example or a batch_size, not both")


def check_number(name: str, value: object) -> None:
    """Refuse what is not a finite number of 0 or more."""
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise UsageError(f"{name} is {value!r}; expected a number, 0 or more")
