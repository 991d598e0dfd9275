"""The contract of a carrier: what moves some tensors of an exchange among the replicas.

`Exchange` makes the calls, in the order that its module has, and says what may be done with a tensor
in between. A tensor has the same index in every carrier as in the exchange. All calls come from one
thread, save for `traffic`. What a snapshot holds of a carrier, or of an exchange, beside the tensors is
its `CarrierState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from torch import Tensor

from poseidon.exchange.base import Array, History
from poseidon.exchange.observer import Traffic
from ps_server.collection import Coming

K = TypeVar("K")
V = TypeVar("V")


class KeptHistories(NamedTuple):
    """What all replicas share of a state after one iteration.

    Attributes:
        histories: by the index of their tensor, in order.
        held_back: what the shards held back then, by name.
    """

    histories: Mapping[int, History]
    held_back: Mapping[str, Array] = MappingProxyType({})


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
        return self.keep({}).result().histories

    def keep(self, into: Mapping[int, History]) -> Coming[KeptHistories]:
        """Begin to copy the histories that all replicas share, and what the shards hold back, after
        the iterations that are finished; return at once.

        Any replica may call it, after `settle` and before the next iteration, and then continue.
        What shards keep comes in the background: a gradient or a value waits for no more than a
        piece of it. Local steps: the outer histories.

        Args:
            into: arrays of an earlier call, by index, which may be written to; empty: new memory.
        """
        return Coming.here(KeptHistories({}))

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

    def keep(self, into: Mapping[int, History]) -> Coming[KeptHistories]:
        with self._around():
            return Coming.together([part.keep(into) for part in self._united], _united)

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


def _united(parts: Sequence[KeptHistories]) -> KeptHistories:
    return KeptHistories(
        in_order(merged(part.histories for part in parts)),
        merged(part.held_back for part in parts),
    )


class Step(NamedTuple):
    """One iteration: its number, and the rates in it (`Trained.rate_index`)."""

    iteration: int
    rates: tuple[float, ...]


class Carrier:
    """Moves some tensors of an exchange, each by its gradient or by its factors. All calls but those
    two do nothing unless they are overridden.

    Attributes:
        by_factors: the tensors whose factors it takes. They do not change.
        state: what a snapshot holds of it.
    """

    indices: Sequence[int]
    by_factors: AbstractSet[int] = frozenset()
    state: CarrierState

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        """See `Exchange.open`; the histories are of all tensors of the exchange."""

    def start(self, step: Step) -> None:
        """Begin an iteration."""

    def begin(self, index: int, gradient: Tensor) -> None:
        """Send a gradient, or the values of statistics, which are read until the tensor's next
        `wait`. Several virtual workers: called for each node of the process with its sum, from left
        to right (`VirtualWorkers.nodes`).
        """
        raise NotImplementedError

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """Send factors. On the host they are copied; on a device they are read until `finish`."""
        raise NotImplementedError

    def release(self, index: int) -> None:
        """Take over a tensor whose factors have begun: its layer does not use it any more."""

    def wait(self, index: int) -> None:
        """Return once a tensor may be used, in this iteration or, after `finish`, in the next."""

    def held_squares(self) -> Sequence[float]:
        """Return numbers whose exact sum is the sum of squares of the gradients that wait for the
        limit of `finish`. Called once before it, where there is a limit on their norm.
        """
        return ()

    def finish(self, limit: float) -> None:
        """End the iteration; `limit` multiplies the gradients that waited for it. A tensor that has
        not begun has a gradient of zero.
        """

    def settle(self, clock: int) -> None:
        """Bring every tensor to the state after `clock` iterations of all replicas."""

    def close(self) -> None:
        """Leave. A second call does nothing."""

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the traffic so far by tensor, where it is counted. Any thread may call this."""
        return {}
