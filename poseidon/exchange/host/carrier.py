"""The carriers of one of several workers of a host.

    pieces.py   which worker owns which part of the tensors
    owner.py    adds what the workers have contributed to this worker's pieces
    group.py    the connections and the memory of the host's workers

Laws:

* An owner exchanges with the owners of the same pieces on other hosts. It contributes the mean over
  the workers of its host where all hosts have as many workers. Otherwise, and with virtual workers,
  it contributes the sum of each node of its host, and of tensors with a codec the gradient of each
  virtual worker.
* Parts are added in a fixed tree (`HostTree`): repeated runs have the same bits.
* The workers of a host stay in step: whatever the staleness of the exchange between hosts, a value
  is published to all of them once, and the next one only after each has contributed to the sum
  before. A worker takes a value before it contributes to the next sum.
* A request of rank 0 reaches each worker on its own way. A value says how many its owner has seen,
  and a worker that takes it waits for as many. Rank 0 owns a piece, and every worker takes its
  values, so all have a request before they end the iteration that it names.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from poseidon.exchange.base import History
from poseidon.exchange.carrier import Carrier, CarrierState, FactoredCarrier, GradientCarrier, Step
from poseidon.exchange.device import Event, device_of
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.host.group import HostGroup
from poseidon.exchange.host.memory import HostMemory
from poseidon.exchange.host.owner import Contribution, Owner
from poseidon.exchange.host.pieces import MOST_PIECES, TOLD_ELEMENTS, HostPieces
from poseidon.exchange.host.state import HostState
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.observer import Traffic
from poseidon.exchange.serial_executor import SerialExecutor
from ps_server import RemoteProtocolError
from ps_server.transport.base import Buffer


class HostCarrier(GradientCarrier, FactoredCarrier):
    """Contributes to the sums of the host, and takes the values.

    Args:
        inner: the exchange between the owners of this worker's pieces. This carrier closes it.
        by_factors: tensors that travel as factors, whole.
        encoded: places among this worker's pieces of those whose gradients a codec takes of each
            virtual worker by itself.
        control: of all workers of the job.
        private: see `HostState`.
    """

    state: HostState

    def __init__(
        self,
        inner: Exchange,
        pieces: HostPieces,
        group: HostGroup,
        *,
        by_factors: frozenset[int],
        encoded: frozenset[int],
        control: JobControl,
        private: bool,
    ) -> None:
        self.indices = range(len(pieces.tensors))
        self.by_factors = by_factors
        self._pieces = pieces
        self._group = group
        self._inner = inner
        self._control = control
        first = pieces.tensors[0].tensor if pieces.tensors else torch.empty(0)
        self._device = device_of(first.device)
        self._out = self._device.stream()
        self._sending = SerialExecutor(
            f"host-out-{group.rank}",
            group.peers.failing("sending gradients to this machine's workers failed"),
            threaded=not self._device.is_host,
            timeout_s=group.peers.timeout_s,
        )
        self._memory = HostMemory(pieces.all, by_factors, group, first)
        self.state = HostState(pieces, inner.state, group, private=private)
        self._owner = Owner(
            inner,
            pieces,
            by_factors=by_factors,
            encoded=encoded,
            group=group,
            memory=self._memory,
            device=self._device,
            control=control,
            state=self.state,
        )
        self._step: Step
        self._round = 0  # publications of the values so far
        self._published = [0] * len(pieces.all)  # of the pieces of others
        self._requests = [0] * len(pieces.all)
        self._taken = [0] * len(pieces.tensors)
        self._begun: Counter[int] = Counter()  # of each tensor, contributed in this iteration
        self._released: set[int] = set()
        self._own_parts: list[Contribution] = []
        self._copied: list[tuple[int, Tensor, Event]] = []
        """Pieces whose parts are on their way to the memory, and the events after which they are
        there.
        """
        self._untold = 0  # elements of what the owners do not know of
        group.peers.on("Values", None, self._note_values)
        group.meetings.gather(b"").result()  # all take each other's messages
        self._owner.start()

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        self._await_taken()
        own = self.state.bring(histories, self._memory.values)
        self._settle(lambda: self._inner.open(own, clock))

    def start(self, step: Step) -> None:
        self._begun.clear()
        self._released.clear()
        self._step = step
        if self._pieces.place:
            self._owner.iterate(step)

    def begin(self, index: int, gradient: Tensor) -> None:
        self._contribute(index, gradient.detach().reshape(-1))

    def _contribute(self, index: int, flat: Tensor | None) -> None:
        """Contribute the next part of a tensor, flat; None: zeros."""
        self.wait(index)
        part, self._begun[index] = self._begun[index], self._begun[index] + 1
        for number in self._pieces.of[index]:
            piece = self._pieces.all[number]
            if flat is None:
                own = torch.zeros_like(self._pieces.values[number])
            else:
                own = flat if piece.is_whole else flat[piece.start : piece.stop]
            ready = self._device.event()
            if number in self._pieces.place:
                place = self._pieces.place[number]
                self._own_parts.append(
                    Contribution(self._group.rank, "Parts", place, part=own, ready=ready)
                )
                continue
            memory = self._memory.parts(number, self._group.rank)[part]
            self._copied.append((number, own, self._device.copy(own, memory, self._out, ready)))
        self._untold += self._pieces.tensors[index].tensor.numel()
        if self._untold >= TOLD_ELEMENTS:
            self._tell()

    def _tell(self) -> None:
        """Let the owners know of all parts that they may add, once these are in the memory."""
        self._owner.contribute(self._own_parts)
        self._sending.call(partial(self._send_parts, self._copied))
        self._own_parts, self._copied, self._untold = [], [], 0

    def _send_parts(self, copied: Sequence[tuple[int, Tensor, Event]]) -> None:
        parts: defaultdict[int, list[int]] = defaultdict(list)
        for number, _, event in copied:
            event.synchronize()
            parts[self._pieces.all[number].plane].append(number)
        for owner, numbers in parts.items():
            for start in range(0, len(numbers), MOST_PIECES):
                self._group.send([owner], "Parts", *numbers[start : start + MOST_PIECES])

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        self.wait(index)
        self._begun[index] += 1
        (number,) = self._pieces.of[index]
        if number in self._pieces.place:
            place = self._pieces.place[number]
            self._owner.stacks[place].own(self._group.rank, u_KN, v_KM)
            ready = self._device.event()
            self._owner.contribute([Contribution(self._group.rank, "Rows", place, ready=ready)])
        else:
            flat = torch.cat([u_KN.detach().reshape(-1), v_KM.detach().reshape(-1)])
            self._sending.call(
                partial(self._send_rows, number, len(u_KN), flat, self._device.event())
            )

    def _send_rows(self, number: int, rows: int, flat: Tensor, ready: Event) -> None:
        """Send factors: the rows of u, then of v."""
        with self._device.on(self._out):
            self._device.wait(ready)
            payload: bytes = flat.float().cpu().numpy().tobytes()
        owner = self._pieces.all[number].plane
        self._group.send([owner], "Rows", number, rows, payload=payload)

    def release(self, index: int) -> None:
        if index in self._released:
            return
        self._released.add(index)
        (number,) = self._pieces.of[index]
        if number in self._pieces.place:
            ready = self._device.event()
            own = Contribution(
                self._group.rank, "Released", self._pieces.place[number], ready=ready
            )
            self._owner.contribute([own])
        else:
            owner = self._pieces.all[number].plane
            self._sending.call(partial(self._group.send, [owner], "Released", number))

    def wait(self, index: int) -> None:
        if self._taken[index] != self._round:
            for number in self._pieces.of[index]:
                self._take(number)
            self._taken[index] = self._round

    def _take(self, number: int) -> None:
        """Wait for a piece's value of this round."""
        place, round_ = self._pieces.place.get(number), self._round
        published = self._published if place is None else self._owner.published
        at = number if place is None else place

        def has_come() -> bool | None:
            if published[at] >= round_:
                return True
            plane = self._pieces.all[number].plane
            self._group.check_left(lambda rank: rank == plane)
            return None

        name = self._pieces.tensors[self._pieces.all[number].index].name
        self._group.monitor.wait_for(has_come, f"tensor '{name}' did not come")
        if place is not None:
            self._device.wait(self._owner.marks[place])
            return
        self._pieces.values[number].copy_(self._memory.values[number], non_blocking=True)
        if self._requests[number]:
            self._control.await_requests(self._requests[number])

    def finish(self, limit: float) -> None:
        for index, trained in enumerate(self._pieces.tensors):
            self.wait(index)
            if index in self.by_factors:
                if not self._begun[index]:
                    outputs, inputs = trained.tensor.shape
                    self.begin_factors(index, torch.empty(0, outputs), torch.empty(0, inputs))
                self.release(index)
            elif not self._begun[index]:
                value = trained.tensor.detach().view(-1)
                self._contribute(index, value if trained.statistics else None)
        self._tell()
        if not self._pieces.place:  # nothing shows this owner that the workers have finished
            self._owner.iterate(self._step)
        self._round += 1

    def settle(self, clock: int) -> None:
        self._await_taken()
        self._settle(self._inner.settle)

    def _settle(self, step: Callable[[], None]) -> None:
        """Let the exchange between hosts make a step, and take all values of it."""
        self._owner.settle(step)
        self._round += 1
        self._take_all()

    def _await_taken(self) -> None:
        """Take all values, and return once all workers of the host have them: others may be
        published.
        """
        self._take_all()
        self._device.event().synchronize()
        self._group.meetings.gather(b"").result()

    def _take_all(self) -> None:
        for index in self.indices:
            self.wait(index)

    def _note_values(self, sender: int, fields: Sequence[int], _: Buffer) -> None:
        for number in fields[1:]:
            if not 0 <= number < len(self._pieces.all) or self._pieces.all[number].plane != sender:
                raise RemoteProtocolError(f"it publishes piece {number}, which it does not own")
        for number in fields[1:]:
            self._published[number] += 1
            self._requests[number] = fields[0]

    def traffic(self) -> Mapping[int, Traffic]:
        found: dict[int, Traffic] = {}
        for place, traffic in self._inner.traffic().items():
            index = self._pieces.all[self._pieces.own[place]].index
            found[index] = traffic if index not in found else found[index].plus(traffic)
        return found

    def close(self) -> None:
        if self._group.monitor.closed:
            return
        if (failure := self._group.monitor.failure) is not None:
            # the other hosts lose this worker, too: it has not left by itself
            self._inner.interrupt(failure)
        self._sending.close()
        self._owner.finish()
        self._memory.give_back()
        self._group.links.leave()
        self._owner.stop()
        self._group.links.close()
        self._memory.close()
        self._inner.close()


class HostRequests(Carrier):
    """A carrier of no tensor, which is the first of an exchange of shards, where the tensors of a
    host's workers differ: each exchanges its own shards of a module with the workers of its plane,
    and nothing passes between the workers of the host but what follows.

    Law: all workers have a request of rank 0 before they end the iteration that it names. The
    worker with local rank 0 is of rank 0's plane, so it has (`job_control.py`). At the end of each
    iteration it tells the others of its host how many it has, and they wait for as many.

    Args:
        control: of all workers of the job.
    """

    indices = ()

    def __init__(self, group: HostGroup, control: JobControl) -> None:
        self.state = CarrierState()
        self._group = group
        self._control = control
        self._counts: deque[int] = deque()
        os.close(group.file)
        group.peers.on("Requests", 1, self._note)
        group.meetings.gather(b"").result()  # all take each other's messages

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        pass

    def start(self, step: Step) -> None:
        pass

    def wait(self, index: int) -> None:
        raise AssertionError("no tensor is of this carrier")

    def finish(self, limit: float) -> None:
        group = self._group
        if group.rank == 0:
            group.send(group.others, "Requests", len(self._control.requests))
            return

        def told() -> int | None:
            if self._counts:
                return self._counts.popleft()
            group.check_left(lambda rank: rank == 0)
            return None

        what = "the requests that the first worker of this machine has did not come"
        self._control.await_requests(group.monitor.wait_for(told, what))

    def settle(self, clock: int) -> None:
        pass

    def close(self) -> None:
        if not self._group.monitor.closed:
            self._group.links.leave()
            self._group.links.close()

    def _note(self, sender: int, fields: Sequence[int], _: Buffer) -> None:
        if sender == 0:
            self._counts.append(fields[0])
