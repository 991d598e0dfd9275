"""The part of one worker as the owner of pieces: a thread adds what the workers of the host have
contributed, lets the exchange between hosts have the sums, and gives the new values to the host.

Law: the thread calls that exchange in the order in which the training loop of a single worker
would: start, begin each piece as soon as all parts of it have come, finish, wait for each and
publish it. So a worker of the host may use the values of the next iteration before their owner
starts it.
"""

from __future__ import annotations

import contextlib
import threading
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
from poseidon.exchange.host.state import HostState
from ps_server import RemoteProtocolError, ServerError
from ps_server.numerics import prepare_thread
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
        self._received: list[Callable[[], None]] = []
        """What takes each contribution."""
        self._commands: deque[Callable[[], None] | None] = deque()
        """What the training loop lets the thread do; None: end."""
        self._closing = False
        group.peers.on("Parts", None, self._note_parts)
        group.peers.on("Rows", 2, self._note_rows)
        group.peers.on("Released", 1, self._note_released)
        self._thread = threading.Thread(
            target=self._run, name=f"owner-{group.network.rank_of(group.rank)}", daemon=True
        )

    def start(self) -> None:
        """Let the thread run."""
        self._thread.start()

    def _note_parts(self, sender: int, pieces: Sequence[int], _: Buffer) -> None:
        places = [self._placed(piece, by_factors=False) for piece in pieces]
        self._received += [partial(self.take_part, place, sender) for place in places]

    def _note_rows(self, sender: int, fields: Sequence[int], payload: Buffer) -> None:
        place = self._placed(fields[0])
        self._received.append(partial(self._take_rows, place, sender, fields[1], payload))

    def _note_released(self, sender: int, fields: Sequence[int], _: Buffer) -> None:
        self._received.append(partial(self.take_release, self._placed(fields[0]), sender))

    def _placed(self, piece: int, *, by_factors: bool = True) -> int:
        place = self._pieces.place.get(piece)
        if place is None or (place in self.stacks) != by_factors:
            raise RemoteProtocolError(
                f"a part came of piece {piece}, which this worker does not own"
            )
        return place

    def contribute(self, contributions: Sequence[Callable[[], None]]) -> None:
        """Take contributions of this worker itself: calls of `take_part`, `take_own_rows` and
        `take_release`.
        """
        with self._group.monitor:
            self._group.monitor.check()
            self._received += contributions
            self._group.monitor.notify()

    def iterate(self, step: Step) -> None:
        """Begin an iteration once the last one has ended; return at once."""
        self._command(lambda: self._iterate(step))

    def settle(self, step: Callable[[], None]) -> None:
        """Run `step`, then publish every piece; return when that is done.

        Args:
            step: `open` or `settle` of the inner exchange.
        """
        ready = self._memory.device.event()

        def command() -> None:
            self._memory.device.wait(ready)
            step()
            self._publish_all()

        self._await(command, "the workers of this machine did not settle")

    def _await(
        self, command: Callable[[], None], otherwise: str, timeout_s: float | None = None
    ) -> None:
        """Let the thread run a command, and wait until it has."""
        done: list[bool] = []

        def run() -> None:
            command()
            with self._group.monitor:
                done.append(True)
                self._group.monitor.notify()

        self._command(run)
        self._group.monitor.wait_for(lambda: done or None, otherwise, timeout_s=timeout_s)

    def finish(self) -> None:
        """Finish what needs nothing more of this worker. It still answers the others."""
        with self._group.monitor:
            self._closing = True
            self._group.monitor.notify()
        with contextlib.suppress(ServerError):
            self._await(lambda: None, "the iteration did not end", LEAVE_S)

    def stop(self) -> None:
        """End the thread."""
        with contextlib.suppress(ServerError):  # where something has failed, it ends by itself
            self._command(None)
        if self._thread.ident is not None:
            self._thread.join(LEAVE_S)

    def _command(self, command: Callable[[], None] | None) -> None:
        with self._group.monitor:
            self._group.monitor.check()
            self._commands.append(command)
            self._group.monitor.notify()

    def _run(self) -> None:
        prepare_thread()
        try:
            device = self._memory.device
            with device.on(device.stream()):
                while (command := self._next_command()) is not None:
                    command()
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: its owner raises the error
            self._group.peers.failing("the exchange of this worker's pieces failed")(error)

    def _next_command(self) -> Callable[[], None] | None:
        """Wait for the next command. Return None when there will be none."""

        def found() -> tuple[Callable[[], None] | None] | None:
            if self._state.questions:
                return (self._state.answer,)
            if self._commands:
                return (self._commands.popleft(),)
            return (None,) if self._group.monitor.failure else None

        return self._group.monitor.wait_for(found, "no command came", limited=False)[0]

    def _next_contributions(self) -> Sequence[Callable[[], None]]:
        """Return what has come, in order; nothing where this worker leaves and still owes its own."""
        rank, owes = self._group.rank, self._contributions.owes

        def found() -> list[Callable[[], None]] | None:
            if self._state.questions or self._received:
                came, self._received = self._received, []
                return came
            if not owes(rank):  # otherwise this worker may be about to close, too
                self._group.check_left(owes)
            return [] if self._closing and owes(rank) else None

        while True:
            # the training loop of this worker may take any time
            came = self._group.monitor.wait_for(
                found,
                "not every worker of this machine has finished the iteration",
                limited=not owes(rank),
            )
            if not self._state.questions:
                return came
            self._state.answer()
            if came:
                return came

    def _iterate(self, step: Step) -> None:
        self.inner.start(step.iteration, *step.rates)
        self._contributions.start()
        while not self._contributions.complete:
            came = self._next_contributions()
            if not came:
                return
            for take in came:
                take()
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
        if self._contributions.note(place, worker):
            self._begin(place)

    def _take_rows(self, place: int, worker: int, rows: int, payload: Buffer) -> None:
        self.stacks[place].add(worker, rows, payload)
        self.take_own_rows(place, worker)

    def take_own_rows(self, place: int, worker: int, ready: Event = DONE) -> None:
        """Note that a worker's factors of a piece are in its stack."""
        self._memory.device.wait(ready)
        if self._contributions.note(place, worker):
            u_RN, v_RM = self.stacks[place].take()
            if u_RN.shape[0]:
                self.inner.begin_factors(place, u_RN, v_RM)

    def take_release(self, place: int, worker: int, ready: Event = DONE) -> None:
        """Note that a worker has released a piece."""
        self._memory.device.wait(ready)
        if self._contributions.note(place, worker, release=True):
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
