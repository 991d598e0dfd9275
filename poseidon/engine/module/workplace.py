"""Where a process stands among the workers of its job, as a training script sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from poseidon.engine.saving import Written
from poseidon.errors import JobError
from poseidon.exchange.base import Exchange
from poseidon.exchange.build import Built, Connect, Membership
from poseidon.layers.base import CPU
from ps_server.trace import NO_TRACE, Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class ThisWorker:
    """One worker.

    Attributes:
        rank: 0..size-1.
        size: number of workers; 1 under plain `python`.
        device: where it is to compute.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a worker's loop has come.

    Attributes:
        steps: finished.
        meetings: calls of the loop in which it waits for all others, begun.
        meeting: the one that it waits in, `mean` or `settle`; empty: none.
    """

    steps: int = 0
    meetings: int = 0
    meeting: str = ""


class Observed(Protocol):
    """An exchange that is looked at while it works."""

    @property
    def exchange(self) -> Exchange:
        """What to train with."""

    def watch(self) -> None:
        """Look at the module's layers from now on: what they do by their hooks, save those put first later, is theirs."""

    def close(self) -> None:
        """Close the exchange, and tell the last of it."""


@dataclass(frozen=True, slots=True)
class Unobserved:
    """An exchange that nobody looks at."""

    exchange: Exchange

    def watch(self) -> None:
        """Nobody does."""

    def close(self) -> None:
        """Close the exchange."""
        self.exchange.close()


def unobserved(built: Built, module: nn.Module) -> Observed:
    """The default of `Workplace.observe`."""
    return Unobserved(built.exchange)


def _alone() -> tuple[str, ...]:
    raise JobError("a worker that is alone has no shards")


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """One worker and the way to its job. The default is a process that is alone.

    Attributes:
        worker: this one.
        member: what its exchange must know.
        connect: waits for the shards' addresses.
        trace: told of what is sent and received.
        observe: puts an observer around the exchange of a module.
        folder: where this job leaves what it makes; None: a process that is alone has no such place.
        checkpoint: what the job goes on from, on rank 0's machine; None: it begins.
        on_saved: called with each checkpoint once it is whole.
        on_open: told of the exchange once it is open: what was built, and what to train with.
        on_move: told of each step that is finished, and of each meeting that begins or ends; cheap.
    """

    worker: ThisWorker = field(default_factory=ThisWorker)
    member: Membership = field(default_factory=Membership)
    connect: Connect = _alone
    trace: Tracer = NO_TRACE
    observe: Callable[[Built, nn.Module], Observed] = unobserved
    folder: Path | None = None
    checkpoint: Path | None = None
    on_saved: Callable[[Written], None] = _nothing
    on_open: Callable[[Built, Exchange], None] = _nothing
    on_move: Callable[[Standing], None] = _nothing
