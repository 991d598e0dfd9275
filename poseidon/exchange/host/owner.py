"""The part of one worker as the owner of pieces: it adds what the workers of the host have
contributed, lets the exchange between hosts have the sums, and gives the new values to the host.

Law: all calls of that exchange are made one after another on one thread, in the order in which the
training loop of a single worker would: start, begin each piece as soon as all parts of it have come,
finish, wait for each and publish it. So a worker of the host may use the values of the next
iteration before their owner starts it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from poseidon.exchange.carrier import Step
from poseidon.exchange.device import DONE, Event
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.host.contributions import Contributions, FactorStack
from poseidon.exchange.host.group import HostGroup
from poseidon.exchange.host.memory import HostMemory
from poseidon.exchange.host.pieces import LEAST_ELEMENTS, MOST_PIECES, HostPieces
from poseidon.exchange.host.state import HostState, What
from poseidon.exchange.serial_executor import SerialExecutor
from ps_server import RemoteProtocolError, ServerError
from ps_server.transport.base import Buffer

LEAVE_S = 2.0
"""Longest time, when the exchange closes, to finish an iteration that other workers are still
in.
"""


class Owner:
    """The pieces that one worker owns.

    Args:
        inner: the exchange between the owners of these pieces; this class calls it, and its owner
            closes it.
        state: answers the others of the host.

    Attributes:
        stacks: the factors by place. The training loop puts this worker's own in before it
            contributes them.
    """

    def __init__(
        self,
        inner: Exchange,
        pieces: HostPieces,
        group: HostGroup,
        memory: HostMemory,
        state: HostState,
    ) -> None:
        self.inner = inner
        self._pieces = pieces
        self._group = group
        self._memory = memory
        self._state = state
        tree = group.tree
        are_by_factors = [pieces.all[number].index in pieces.by_factors for number in pieces.own]
        self._contributions = Contributions(
            are_by_factors, [len(tree.parts(worker)) for worker in range(group.size)]
        )
        divisor = group.size if tree.averages else 1
        self.stacks: Mapping[int, FactorStack] = {
            place: FactorStack(trained.tensor, divisor=divisor)
            for place, trained in enumerate(pieces.trained)
            if are_by_factors[place]
        }
        self._parts: dict[int, list[Tensor]] = {}
        self._steps: deque[Step] = deque()
        """The iterations that this worker has begun, and the thread has not."""
        self._received: list[Callable[[], None]] = []
        """What takes each contribution to the iteration under way, or to the next one."""
        self._stream = memory.device.stream()
        self._calls = SerialExecutor(
            f"owner-{group.network.rank_of(group.rank)}",
            group.peers.failing("the exchange of this worker's pieces failed"),
            threaded=True,
            timeout_s=LEAVE_S,
        )
        group.peers.on("Parts", None, self._note_parts)
        group.peers.on("Rows", 2, self._note_rows)
        group.peers.on("Released", 1, self._note_released)
        group.peers.on("Ask", 2, self._note_question)

    def _note_parts(self, sender: int, pieces: Sequence[int], _: Buffer) -> None:
        places = [self._placed(piece, by_factors=False) for piece in pieces]
        self.contribute([partial(self.take_part, place, sender) for place in places])

    def _note_rows(self, sender: int, fields: Sequence[int], payload: Buffer) -> None:
        place = self._placed(fields[0])
        self.contribute([partial(self._take_rows, place, sender, fields[1], payload)])

    def _note_released(self, sender: int, fields: Sequence[int], _: Buffer) -> None:
        self.contribute([partial(self.take_release, self._placed(fields[0]), sender)])

    def _note_question(self, sender: int, fields: Sequence[int], _: Buffer) -> None:
        number, what = fields
        if what not in [each.value for each in What]:
            raise RemoteProtocolError("it asks for an unknown state")
        self._call(partial(self._state.answer, sender, number, What(what)))

    def _placed(self, piece: int, *, by_factors: bool = True) -> int:
        place = self._pieces.place.get(piece)
        if place is None or (place in self.stacks) != by_factors:
            raise RemoteProtocolError(
                f"a part came of piece {piece}, which this worker does not own"
            )
        return place

    def _call(self, function: Callable[[], None]) -> None:
        """Let the thread call a function after all earlier ones; return at once."""

        def call() -> None:
            with self._memory.device.on(self._stream):
                function()

        self._calls.call(call)

    def contribute(self, contributions: Sequence[Callable[[], None]]) -> None:
        """Take contributions of a worker: calls of `take_part`, `take_own_rows` and
        `take_release`.
        """
        self._call(partial(self._advance, contributions))

    def iterate(self, step: Step) -> None:
        """Begin an iteration once the last one has ended; return at once."""
        self._call(partial(self._advance, (), [step]))

    def settle(self, step: Callable[[], None]) -> None:
        """Run `step`, then publish every piece; return when that is done.

        Args:
            step: `open` or `settle` of the inner exchange.
        """
        ready, monitor = self._memory.device.event(), self._group.monitor
        done: list[bool] = []

        def call() -> None:
            self._memory.device.wait(ready)
            step()
            self._publish_all()
            with monitor:
                done.append(True)
                monitor.notify()

        self._call(call)
        monitor.wait_for(lambda: done or None, "the workers of this machine did not settle")

    def owes(self, worker: int) -> bool:
        """Return whether a worker has not contributed all to the iteration under way. Under the
        monitor.
        """
        return self._contributions.owes(worker)

    def finish(self) -> None:
        """Finish what needs nothing more of this worker. It still answers the others."""
        left, rank = self._contributions, self._group.rank
        with contextlib.suppress(ServerError):
            self._calls.drain()  # with this worker's own contributions
            self._group.monitor.wait_for(
                lambda: True if left.complete or left.owes(rank) else None,
                "the iteration did not end",
                timeout_s=LEAVE_S,
            )
            self._calls.drain()

    def close(self) -> None:
        """End the thread."""
        self._calls.close()

    def _advance(
        self, contributions: Sequence[Callable[[], None]], steps: Sequence[Step] = ()
    ) -> None:
        """Do what can be done: begin an iteration, take what has come, and end the iteration."""
        self._steps += steps
        self._received += contributions
        while self._steps or not self._contributions.complete:
            if self._contributions.complete:
                step = self._steps.popleft()
                self.inner.start(step.iteration, *step.rates)
                with self._group.monitor:
                    self._contributions.start()
            received, self._received = self._received, []
            for take in received:
                take()
            if not self._contributions.complete:
                return
            self.inner.finish()
            self._publish_all()

    def _publish_all(self) -> None:
        """Publish the pieces in order, small ones together."""
        start = elements = 0
        for place, piece in enumerate(self._pieces.own):
            self.inner.wait(place)
            value = self._pieces.values[piece]
            self._memory.values[piece].copy_(value, non_blocking=True)
            elements += value.numel()
            stop = place + 1
            is_full = elements >= LEAST_ELEMENTS or stop - start == MOST_PIECES
            if is_full or stop == len(self._pieces.own):
                self._memory.publish(self._pieces.own[start:stop])
                start, elements = stop, 0

    def _note(self, place: int, worker: int, *, release: bool = False) -> bool:
        with self._group.monitor:  # `owes` reads it
            return self._contributions.note(place, worker, release=release)

    # What the thread does of a contribution.

    def take_part(
        self, place: int, worker: int, part: Tensor | None = None, ready: Event = DONE
    ) -> None:
        """Take a worker's next part of a piece.

        Args:
            part: this worker's own; that of another is in the memory.
            ready: the event after which it may be read.
        """
        self._memory.device.wait(ready)
        if part is not None:
            self._parts.setdefault(place, []).append(part)
        if self._note(place, worker):
            self._begin(place)

    def _take_rows(self, place: int, worker: int, rows: int, payload: Buffer) -> None:
        self.stacks[place].add(worker, rows, payload)
        self.take_own_rows(place, worker)

    def take_own_rows(self, place: int, worker: int, ready: Event = DONE) -> None:
        """Note that a worker's factors of a piece are in its stack."""
        self._memory.device.wait(ready)
        if self._note(place, worker):
            u_RN, v_RM = self.stacks[place].take()
            if u_RN.shape[0]:
                self.inner.begin_factors(place, u_RN, v_RM)

    def take_release(self, place: int, worker: int, ready: Event = DONE) -> None:
        """Note that a worker has released a piece."""
        self._memory.device.wait(ready)
        if self._note(place, worker, release=True):
            self.inner.release(place)

    def _begin(self, place: int) -> None:
        piece, group, memory = self._pieces.own[place], self._group, self._memory
        own = self._parts.pop(place)
        parts = [
            own
            if worker == group.rank
            else [part.to(own[0].device, non_blocking=True) for part in memory.parts(piece, worker)]
            for worker in range(group.size)
        ]
        for part in own:
            memory.device.keep(part)
        for total in group.tree.sums(parts, encoded=place in self._pieces.encoded):
            if memory.on_gpus and not any(total is part for part in own):
                total = total.clone()  # its place is free for the next part once the value is out
            self.inner.begin(place, total.view(self._pieces.trained[place].tensor.shape))
