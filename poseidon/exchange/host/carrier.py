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

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from poseidon.exchange.base import History
from poseidon.exchange.carrier import Carrier, CarrierState, Step
from poseidon.exchange.device import Event
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.host.group import HostGroup
from poseidon.exchange.host.memory import HostMemory
from poseidon.exchange.host.owner import Owner
from poseidon.exchange.host.pieces import MOST_PIECES, TOLD_ELEMENTS, HostPieces
from poseidon.exchange.host.state import HostState
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.observer import Traffic
from poseidon.exchange.serial_executor import SerialExecutor
from ps_server.transport.base import Buffer


class HostCarrier(Carrier):
    """Contributes to the sums of the host, and takes the values.

    Args:
        inner: the exchange between the owners of this worker's pieces. This carrier closes it.
        control: of all workers of the job.
        private: see `HostState`.
    """

    state: HostState

    def __init__(
        self,
        inner: Exchange,
        pieces: HostPieces,
        group: HostGroup,
        control: JobControl,
        *,
        private: bool,
    ) -> None:
        self.indices = range(len(pieces.tensors))
        self.by_factors = pieces.by_factors
        self._pieces = pieces
        self._group = group
        self._memory = HostMemory(pieces, group, control)
        self.state = HostState(pieces, inner.state, group, private=private)
        self._owner = Owner(inner, pieces, group, self._memory, self.state)
        self._out = Contributing(pieces, group, self._memory, self._owner)
        self._step: Step
        self._due: set[int] = set()  # tensors whose published values this worker has not taken
        self._begun: Counter[int] = Counter()  # of each tensor, contributed in this iteration
        self._released: set[int] = set()
        group.meetings.gather(b"").result()  # all take each other's messages

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        self._await_taken()
        own = self.state.bring(histories, self._memory.values)
        self._settle(lambda: self._owner.inner.open(own, clock))

    def start(self, step: Step) -> None:
        self._begun.clear()
        self._released.clear()
        self._step = step
        if self._pieces.own:
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
            self._out.add(number, own, part)
        self._out.tell(at_least=TOLD_ELEMENTS)

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        self.wait(index)
        self._begun[index] += 1
        self._out.add_factors(self._pieces.of[index][0], u_KN, v_KM)

    def release(self, index: int) -> None:
        if index not in self._released:
            self._released.add(index)
            self._out.release(self._pieces.of[index][0])

    def wait(self, index: int) -> None:
        if index in self._due:
            for number in self._pieces.of[index]:
                self._memory.take(number, self._owner.owes)
            self._due.discard(index)

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
        self._out.tell()
        if not self._pieces.own:  # nothing shows this owner that the workers have finished
            self._owner.iterate(self._step)
        self._due.update(self.indices)

    def settle(self, clock: int) -> None:
        self._await_taken()
        self._settle(self._owner.inner.settle)

    def _settle(self, step: Callable[[], None]) -> None:
        """Let the exchange between hosts make a step, and take all values of it."""
        self._owner.settle(step)
        self._due.update(self.indices)
        self._take_all()

    def _await_taken(self) -> None:
        """Take all values, and return once all workers of the host have them: others may be
        published.
        """
        self._take_all()
        self._memory.device.event().synchronize()
        self._group.meetings.gather(b"").result()

    def _take_all(self) -> None:
        for index in self.indices:
            self.wait(index)

    def traffic(self) -> Mapping[int, Traffic]:
        found: dict[int, Traffic] = {}
        for place, traffic in self._owner.inner.traffic().items():
            index = self._pieces.all[self._pieces.own[place]].index
            found[index] = traffic if index not in found else found[index].plus(traffic)
        return found

    def close(self) -> None:
        if self._group.monitor.closed:
            return
        if (failure := self._group.monitor.failure) is not None:
            # the other hosts lose this worker, too: it has not left by itself
            self._owner.inner.interrupt(failure)
        self._out.close()
        self._owner.finish()
        self._memory.give_back()
        self._group.leave()
        self._owner.close()
        self._memory.close()
        self._owner.inner.close()


class Contributing:
    """What one worker contributes, on its way to the owners of the pieces, itself among them."""

    def __init__(
        self, pieces: HostPieces, group: HostGroup, memory: HostMemory, owner: Owner
    ) -> None:
        self._pieces = pieces
        self._group = group
        self._memory = memory
        self._owner = owner
        self._stream = memory.device.stream()
        self._sending = SerialExecutor(
            f"host-out-{group.rank}",
            group.peers.failing("sending gradients to this machine's workers failed"),
            threaded=not memory.device.is_host,
            timeout_s=group.peers.timeout_s,
        )
        self._own: list[Callable[[], None]] = []
        self._copied: list[tuple[int, Tensor, Event]] = []
        """Pieces whose parts are on their way to the memory, and the events after which they are
        there.
        """
        self._untold = 0  # elements of what the owners do not know of

    def add(self, number: int, own: Tensor, part: int) -> None:
        """Contribute a part of a piece. Its owner knows of it after the next `tell`."""
        device, rank = self._memory.device, self._group.rank
        ready = device.event()
        if number in self._pieces.place:
            place = self._pieces.place[number]
            self._own.append(partial(self._owner.take_part, place, rank, own, ready))
        else:
            memory = self._memory.parts(number, rank)[part]
            self._copied.append((number, own, device.copy(own, memory, self._stream, ready)))
        self._untold += own.numel()

    def tell(self, at_least: int = 0) -> None:
        """Let the owners know of all parts that they may add, once these are in the memory.

        Args:
            at_least: of so many elements; fewer wait for others.
        """
        if self._untold >= at_least:
            self._owner.contribute(self._own)
            self._sending.call(partial(self._send_parts, self._copied))
            self._own, self._copied, self._untold = [], [], 0

    def _send_parts(self, copied: Sequence[tuple[int, Tensor, Event]]) -> None:
        parts: defaultdict[int, list[int]] = defaultdict(list)
        for number, _, event in copied:
            event.synchronize()
            parts[self._pieces.all[number].plane].append(number)
        for owner, numbers in parts.items():
            for start in range(0, len(numbers), MOST_PIECES):
                self._group.send([owner], "Parts", *numbers[start : start + MOST_PIECES])

    def add_factors(self, number: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """Contribute the factors of a piece."""
        device, rank = self._memory.device, self._group.rank
        if number in self._pieces.place:
            place = self._pieces.place[number]
            self._owner.stacks[place].own(rank, u_KN, v_KM)
            take = partial(self._owner.take_own_rows, place, rank, device.event())
            self._owner.contribute([take])
        else:
            flat = torch.cat([u_KN.detach().reshape(-1), v_KM.detach().reshape(-1)])
            self._sending.call(partial(self._send_rows, number, len(u_KN), flat, device.event()))

    def _send_rows(self, number: int, rows: int, flat: Tensor, ready: Event) -> None:
        """Send factors: the rows of u, then of v."""
        with self._memory.device.on(self._stream):
            self._memory.device.wait(ready)
            payload: bytes = flat.float().cpu().numpy().tobytes()
        owner = self._pieces.all[number].plane
        self._group.send([owner], "Rows", number, rows, payload=payload)

    def release(self, number: int) -> None:
        """Release a piece, whose factors are contributed."""
        if number in self._pieces.place:
            place, ready = self._pieces.place[number], self._memory.device.event()
            take = partial(self._owner.take_release, place, self._group.rank, ready)
            self._owner.contribute([take])
        else:
            owner = self._pieces.all[number].plane
            self._sending.call(partial(self._group.send, [owner], "Released", number))

    def close(self) -> None:
        """Send what is left, and stop."""
        self._sending.close()


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
        group.peers.on("Requests", 1, self._note)
        group.meetings.gather(b"").result()  # all take each other's messages

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

    def close(self) -> None:
        if not self._group.monitor.closed:
            self._group.leave()

    def _note(self, sender: int, fields: Sequence[int], _: Buffer) -> None:
        if sender == 0:
            self._counts.append(fields[0])
