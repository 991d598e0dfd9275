"""Where a process stands among the workers of its job, as a training script sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from poseidon.errors import JobError
from poseidon.exchange.base import Trained
from poseidon.exchange.build import Built, Connect, Membership
from poseidon.layers.base import CPU


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
        on_open: told of the exchange, once it is open, and of the tensors.
        on_step: told of the number of finished steps after each; cheap.
    """

    worker: ThisWorker = field(default_factory=ThisWorker)
    member: Membership = field(default_factory=Membership)
    connect: Connect = _alone
    on_open: Callable[[Built, list[Trained]], None] = _nothing
    on_step: Callable[[int], None] = _nothing
