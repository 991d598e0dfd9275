"""The contract of a carrier: what moves some tensors of an exchange among the replicas.

`Exchange` calls its carriers, each for its own tensors, in the order that is in `exchange.py`:

    ServerCarrier       to the shards of the parameter server and back
    FactorCarrier       as factors, to all other workers
    AllReduceCarrier    by a sum over all workers
    AloneCarrier        nowhere: one process
    HostCarrier         among the workers of a host; it has an exchange of the pieces that this
                        worker owns
    RoundsCarrier       in rounds of local steps; it has an exchange of the rounds' first values

A tensor has the same index in every carrier as in the exchange. All calls come from one thread,
save for `traffic`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import Array, History, Trained
from poseidon.exchange.observer import Traffic
from ps_server import Client
from ps_server.rules import history_count, update

K = TypeVar("K")
V = TypeVar("V")


class Step(NamedTuple):
    """One iteration: its number, and the rates in it (`Trained.rate_index`)."""

    iteration: int
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class KeptHistories:
    """Histories by the index of their tensor, after one iteration, on their way.

    Attributes:
        poll: returns them once all are here, and None before.
        result: waits for them.
        held_back: what the shards held back then, by name; waits, too.
    """

    poll: Callable[[], Mapping[int, History] | None]
    result: Callable[[], Mapping[int, History]]
    held_back: Callable[[], Mapping[str, Array]] = dict

    @classmethod
    def here(cls, histories: Mapping[int, History]) -> KeptHistories:
        """Return what is here already."""
        return cls(lambda: histories, lambda: histories)

    @classmethod
    def of(cls, parts: Sequence[KeptHistories]) -> KeptHistories:
        """Return what several parts have, in the order of indices."""

        def poll() -> Mapping[int, History] | None:
            found = [came for part in parts if (came := part.poll()) is not None]
            return in_order(merged(found)) if len(found) == len(parts) else None

        return cls(
            poll,
            lambda: in_order(merged(part.result() for part in parts)),
            lambda: merged(part.held_back() for part in parts),
        )


def merged(parts: Iterable[Mapping[K, V]]) -> dict[K, V]:
    """Return the entries of several mappings, which have no key in common."""
    return {key: value for part in parts for key, value in part.items()}


def in_order(histories: Mapping[int, History]) -> dict[int, History]:
    """Return histories in the order of their tensors."""
    return dict(sorted(histories.items()))


class CarrierState:
    """What a snapshot holds of an exchange, or of a carrier, beside the tensors. It may be read
    after `settle`.
    """

    private = False
    """Whether each host has histories of its own (staleness > 0), or all replicas share one."""
    overtaken = False
    """Whether other replicas may continue before `keep` returns, and change what this one keeps: then
    all wait for each other after it, before the next iteration.
    """

    def histories(self) -> Mapping[int, History]:
        """Return each tensor's history, by index and in the order of indices.

        Private histories: all replicas call it together, and each gets its host's. A shared
        history: only rank 0 calls it.
        """
        return self.keep({}).result()

    def keep(self, into: Mapping[int, History]) -> KeptHistories:
        """Begin to copy the histories that all replicas share, and what the shards hold back, after
        the iterations that are finished; return at once.

        Any replica may call it, after `settle` and before the next iteration, and then continue.
        What shards keep comes in the background: a gradient or a value waits for no more than a
        piece of it. Local steps: the outer histories.

        Args:
            into: arrays of an earlier call, by index, which may be written to; empty: new memory.
        """
        return KeptHistories.here({})

    def parts(self) -> Mapping[str, Tensor]:
        """Return live tensors of what belongs to single virtual workers of this process and is as
        large as the tensors, by name: what codecs hold back, and inner histories.
        """
        return {}

    def replicated(self) -> Mapping[str, Tensor]:
        """Return live tensors of what is equal on all replicas beside the tensors, by name."""
        return {}

    def held_back(self) -> Mapping[str, Array]:
        """Return what lossy codecs have held back, flat and by name.

        It is private to each host; empty without codecs. Rank 0's includes what the shards hold
        back.
        """
        return {}

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        """Continue at the next `open` from what `held_back` has returned, its histories given, and
        from copies of `parts`.

        A worker that is not given what belongs to its virtual workers gets it from rank 0, if that
        is given it. Other names are ignored.

        Raises:
            SnapshotError: an array has a different size than its tensor.
        """


class UnitedState(CarrierState):
    """The state of several parts together.

    Args:
        around: entered around each call that may wait for other workers.
    """

    def __init__(
        self,
        united: Sequence[CarrierState],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._united = united
        self._around = around
        self.private = any(part.private for part in united)
        self.overtaken = any(part.overtaken for part in united)

    def histories(self) -> Mapping[int, History]:
        with self._around():
            return in_order(merged(part.histories() for part in self._united))

    def keep(self, into: Mapping[int, History]) -> KeptHistories:
        with self._around():
            return KeptHistories.of([part.keep(into) for part in self._united])

    def parts(self) -> Mapping[str, Tensor]:
        return merged(part.parts() for part in self._united)

    def replicated(self) -> Mapping[str, Tensor]:
        return merged(part.replicated() for part in self._united)

    def held_back(self) -> Mapping[str, Array]:
        with self._around():
            return merged(part.held_back() for part in self._united)

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        for part in self._united:
            part.hold_back(held_back)


class Carrier(ABC):
    """Moves some tensors of an exchange. It takes gradients or factors, or both.

    Attributes:
        state: what a snapshot holds of it.
    """

    indices: Sequence[int]
    state: CarrierState

    @abstractmethod
    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        """Bring the carrier's tensors, and their histories, to rank 0's on every replica; see
        `Exchange.open`.

        Args:
            histories: of all tensors of the exchange.
            clock: None at the first call.
        """

    @abstractmethod
    def start(self, step: Step) -> None:
        """Begin an iteration."""

    @abstractmethod
    def wait(self, index: int) -> None:
        """Return once a tensor may be used, in this iteration or, after `finish`, in the next."""

    def held_squares(self) -> list[float]:
        """Return numbers whose exact sum is the sum of squares of this worker's gradients that wait
        for the limit of `finish`.

        It is called once in an iteration with a limit on the gradients' norm, before `finish`.
        """
        return []

    @abstractmethod
    def finish(self, limit: float) -> None:
        """End the iteration. A tensor that has not begun has a gradient of zero.

        Args:
            limit: multiplies the gradients that waited for it.
        """

    @abstractmethod
    def settle(self, clock: int) -> None:
        """Bring every tensor to the state after `clock` iterations of all replicas."""

    @abstractmethod
    def close(self) -> None:
        """Leave. A second call does nothing."""

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the traffic so far by tensor, where it is counted. Any thread may call this."""
        return {}


class GradientCarrier(Carrier):
    """A carrier that takes whole gradients."""

    @abstractmethod
    def begin(self, index: int, gradient: Tensor) -> None:
        """Send the gradient of a tensor, or the values of statistics; return at once.

        With several virtual workers on this process it is called once for each node of the process
        (`VirtualWorkers.nodes`), with the sum, from left to right. It is read until the tensor's
        next `wait`.
        """


class FactoredCarrier(Carrier):
    """A carrier that takes factors of gradients.

    Attributes:
        by_factors: the tensors whose factors it takes. They do not change.
    """

    by_factors: AbstractSet[int]

    @abstractmethod
    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """Send the factors of a tensor; return at once.

        On the host they are copied. On a device they may be written to after `finish`.
        """

    @abstractmethod
    def release(self, index: int) -> None:
        """Take over a tensor whose factors have begun: its layer does not use it any more."""


class SharedNorm:
    """The norm that carriers share: one sum for the server.

    Args:
        carriers: their names. Each adds once an iteration, on rank 0.
    """

    def __init__(self, client: Client, carriers: Collection[str]) -> None:
        self._client = client
        self._carriers = carriers
        self._lock = threading.Lock()
        self._squares: dict[int, dict[str, Sequence[float]]] = {}

    def add(self, carrier: str, clock: int, squares: Sequence[float]) -> None:
        """Add numbers whose exact sum is the sum of squares of a carrier's gradients. Rank 0."""
        with self._lock:
            parts = self._squares.setdefault(clock, {})
            parts[carrier] = squares
            if len(parts) < len(self._carriers):
                return
            del self._squares[clock]
        self._client.add_norm(clock, list(chain(*parts.values())))

    def total(self, clock: int) -> float:
        """Wait for the sum of squares over all gradients."""
        return self._client.total_norm(clock)


class RuledTensor:
    """A tensor to which this worker applies the rule itself.

    Attributes:
        flat: the tensor.
        history: what the rule keeps, flat.
    """

    __slots__ = ("flat", "history", "trained")

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.flat = trained.tensor.detach().view(-1)
        self.history = [
            torch.zeros_like(self.flat) for _ in range(history_count(trained.rule.kind))
        ]

    def apply(self, gradient: Tensor, step: Step, scale: float) -> None:
        """Apply the rule to a gradient times `scale`. The gradient, flat, is written to."""
        if scale != 1.0:
            gradient.mul_(scale)
        rule, rate = self.trained.rule, step.rates[self.trained.rate_index]
        update(rule, gradient, self.history, self.flat, rate=rate, step=step.iteration)

    def load(self, history: History) -> None:
        """Continue from a history: from zeros where there are no arrays."""
        for tensor, array in zip_longest(self.history, history[: len(self.history)]):
            tensor.zero_()
            if array is not None:
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(array, np.float32)).view(-1))

    def copied(self, into: History | None) -> History:
        """Return a copy of the history; in these arrays where they fit."""
        if into is None or len(into) != len(self.history):
            shape = tuple(self.trained.tensor.shape)
            into = [np.empty(shape, np.float32) for _ in self.history]
        for array, tensor in zip(into, self.history, strict=True):
            torch.from_numpy(array).view(-1).copy_(tensor)
        return into


class LocalHistories(CarrierState):
    """The histories of a carrier's tensors.

    Args:
        replicated: whether other replicas keep the same history.

    Attributes:
        of: the tensors with their histories.
    """

    def __init__(self, tensors: Mapping[int, Trained], *, replicated: bool) -> None:
        self._replicated = replicated
        self.of = {index: RuledTensor(trained) for index, trained in tensors.items()}

    def load(self, histories: Sequence[History] | None) -> None:
        """Continue from these histories of all tensors: from zeros where there are none."""
        for index, own in self.of.items():
            own.load(histories[index] if histories else ())

    def flat(self) -> list[Tensor]:
        """Return all history tensors."""
        return [tensor for own in self.of.values() for tensor in own.history]

    def keep(self, into: Mapping[int, History]) -> KeptHistories:
        return KeptHistories.here({i: own.copied(into.get(i)) for i, own in self.of.items()})

    def replicated(self) -> Mapping[str, Tensor]:
        if not self._replicated:
            return {}
        return {
            f"{own.trained.name}, history {number}": tensor
            for own in self.of.values()
            for number, tensor in enumerate(own.history)
        }
