"""Snapshots in memory: what a job continues from when it has lost a worker.

Laws:

* A memory snapshot is the state after one iteration that all workers have finished, as one on disk
  is. A job that continues from it has the bits of an undisturbed one.
* Every worker has the states of all virtual workers. The first worker of each of the first hosts
  (`holds`) has the values, the histories, and the large parts of the virtual workers' states as
  well (`large_parts.py`), so one of them can start all others.
* Training continues while histories arrive. A snapshot counts once all of it is there; until then
  the one before it does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poseidon.caffe.proto.caffe_pb2 import PoseidonState, PoseidonWorkerState
from poseidon.caffe.solver.averages import parts
from poseidon.caffe.solver.checkpoint import SolverProgress
from poseidon.caffe.solver.frozen import FrozenHistories
from poseidon.caffe.solver.large_parts import ComingParts, Head, OwnParts
from poseidon.caffe.solver.replica import Replica
from poseidon.caffe.solver.worker_state import restore, state_of
from poseidon.engine.elastic import COSTS, SnapshotInterval
from poseidon.exchange.base import Array, History
from poseidon.exchange.broadcast import broadcast_bytes
from poseidon.exchange.carrier import Kept
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.job_control import JobControl, join, split
from poseidon.exchange.kinds import Scheme
from ps_server import Collection


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """A complete snapshot.

    Attributes:
        state: test passes made, and the state of each virtual worker, in order.
        frozen: `FrozenHistories.pack`.
        schemes: of each trained tensor, where a start cannot find it out again.
        values: of each trained tensor; empty: this worker does not hold them.
        histories: one per trained tensor; empty: as `values`.
        held_back: the large parts of the states of all virtual workers, and what the shards hold
            back, by name; on a worker that does not hold them the parts of its own.
    """

    iteration: int
    state: PoseidonState
    frozen: bytes
    schemes: tuple[Scheme, ...]
    values: Sequence[Tensor]
    histories: Sequence[History]
    held_back: Mapping[str, Array]

    def restore_values(self, replica: Replica) -> None:
        """Set the trained tensors to the values, on a worker that holds them."""
        for trained, value in zip(replica.trained, self.values, strict=True):
            trained.tensor.detach().copy_(value)


def arrive(
    newest: MemorySnapshot | None,
    replica: Replica,
    frozen: FrozenHistories,
    control: JobControl,
    iteration: int,
) -> SolverProgress:
    """Bring the virtual workers of this process to the states in rank 0's memory snapshot; return
    the position of the loop. All workers call it together, once the exchange is open.

    Args:
        iteration: the iteration of rank 0's snapshot.
    """
    own = None
    if control.root and newest is not None:
        own = join([newest.state.SerializeToString(), newest.frozen])
    packed = broadcast_bytes(own, control.all_gather, rank=replica.context.rank)
    assert packed is not None, "worker 0 has checked its snapshot"
    packed_state, packed_frozen = split(packed)
    state = PoseidonState.FromString(packed_state)
    for nets in replica.nets:
        restore(nets, state.worker[nets.number])
    frozen.unpack(packed_frozen)
    return SolverProgress(
        iteration=iteration,
        tests_done=state.tests_done,
        losses=tuple(tuple(state.worker[nets.number].smoothed_loss) for nets in replica.nets),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A snapshot whose parts are on their way; fields as of `MemorySnapshot`."""

    iteration: int
    tests_done: int
    states: Collection
    values: Sequence[Tensor]
    kept: Kept | None
    large: OwnParts


class MemorySnapshots:
    """The memory snapshots of one worker.

    Args:
        frozen: the histories of blobs that do not learn, where virtual worker 0 is.
        holds: whether this worker holds values and histories.
        schemes: of each trained tensor; see `MemorySnapshot`.
        newest: of the start before; None: there is none.

    Attributes:
        newest: the newest complete one. Its memory is used again after the next one.
    """

    def __init__(
        self,
        replica: Replica,
        exchange: Exchange,
        frozen: FrozenHistories,
        *,
        holds: bool,
        interval: SnapshotInterval,
        schemes: tuple[Scheme, ...] = (),
        newest: MemorySnapshot | None = None,
    ) -> None:
        self._replica = replica
        self._exchange = exchange
        self._frozen = frozen
        self._holds = holds
        self._interval = interval
        self._schemes = schemes
        self._begun: _Begun | None = None
        self._coming: ComingParts | None = None
        self._spare: Sequence[Tensor] = ()
        self._spare_histories: Sequence[History] = ()
        self.newest = newest

    def is_due(self, iteration: int) -> bool:
        """Return whether all workers take a snapshot when so many iterations are finished."""
        return self._interval.is_due(iteration)

    def begin(self, iteration: int, tests_done: int, losses: Mapping[int, Sequence[float]]) -> None:
        """Begin a snapshot. Every worker calls it after the same iteration.

        Args:
            losses: in the average of each virtual worker of this process, oldest first.
        """
        self.finish()
        began_s = time.perf_counter()
        exchange, replica = self._exchange, self._replica
        exchange.settle()
        states = [state_of(nets, losses[nets.number]) for nets in replica.nets]
        has_first = any(nets.number == 0 for nets in replica.nets)
        frozen = self._frozen.pack() if has_first else b""
        packed = join(state.SerializeToString() for state in states)
        large = OwnParts(exchange.state.parts())
        spare, self._spare_histories = self._spare_histories, ()
        self._begun = _Begun(
            iteration=iteration,
            tests_done=tests_done,
            kept=exchange.state.keep(dict(enumerate(spare))) if self._holds else None,
            states=exchange.control.gather(
                join(
                    [
                        COSTS.pack(*self._interval.costs()),
                        large.head(holds=self._holds),
                        frozen,
                        packed,
                    ]
                )
            ),
            values=self._copied_values() if self._holds else (),
            large=large,
        )
        if exchange.state.overtaken:
            self._begun.states.result()
        self._interval.begun(iteration, time.perf_counter() - began_s)

    def _copied_values(self) -> Sequence[Tensor]:
        tensors = [trained.tensor.detach() for trained in self._replica.trained]
        copies = self._spare or [torch.empty_like(tensor) for tensor in tensors]
        self._spare = ()
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        return copies

    def follow(self, seconds: float) -> None:
        """Take what has come of a snapshot; all workers call it after each iteration."""
        begun = self._begun
        self._interval.note(seconds, transferring=begun is not None)
        if begun is None:
            return
        coming = self._parts_of(begun)  # states: sent before an iteration that all have finished
        coming.send()
        is_here = coming.poll() is not None
        if is_here and (begun.kept is None or begun.kept.poll() is not None):
            self._complete(begun)

    def finish(self) -> None:
        """Wait until the snapshot that has begun, if any, is complete."""
        if self._begun is not None:
            self._complete(self._begun)

    def _parts_of(self, begun: _Begun) -> ComingParts:
        """Return the large parts on their way. At first wait for what all workers have sent, and
        choose when the next snapshot is due.
        """
        if self._coming is None:
            sent = [split(payload) for payload in begun.states.result()]
            self._interval.decide([COSTS.unpack(costs) for costs, *_ in sent])
            self._coming = ComingParts(
                begun.large,
                [Head.unpack(head) for _, head, *_ in sent],
                self._exchange.control,
                rank=self._replica.context.rank,
                iterations=self._interval.left(begun.iteration),
            )
        return self._coming

    def _complete(self, begun: _Begun) -> None:
        large = self._parts_of(begun).result()
        sent = [split(payload) for payload in begun.states.result()]
        before = self.newest
        self.newest = MemorySnapshot(
            iteration=begun.iteration,
            state=PoseidonState(
                tests_done=begun.tests_done,
                worker=map(PoseidonWorkerState.FromString, parts(states for *_, states in sent)),
            ),
            frozen=next((frozen for *_, frozen, _ in sent if frozen), b""),
            schemes=self._schemes,
            values=begun.values,
            histories=() if begun.kept is None else list(begun.kept.result().values()),
            held_back={**large, **({} if begun.kept is None else begun.kept.held_back())},
        )
        self._begun = self._coming = None
        if before is not None:
            self._spare, self._spare_histories = before.values, before.histories
