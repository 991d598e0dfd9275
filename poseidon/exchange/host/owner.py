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
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from poseidon.exchange.carrier import Step
from poseidon.exchange.device import DONE, Device, Event
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.host.contributions import Contributions, FactorStack
from poseidon.exchange.host.group import HostGroup
from poseidon.exchange.host.memory import HostMemory
from poseidon.exchange.host.pieces import LEAST_ELEMENTS, MOST_PIECES, HostPieces
from poseidon.exchange.host.state import HostState
from poseidon.exchange.job_control import JobControl
from ps_server import RemoteProtocolError, ServerError
from ps_server.numerics import prepare_thread
from ps_server.transport.base import Buffer

LEAVE_S = 2.0
"""Longest time, when the exchange closes, to finish an iteration that other workers are still
in.
"""


class Contribution(NamedTuple):
    """What one worker of the host contributes to a piece.

    Attributes:
        worker: its local rank.
        kind: "Parts", "Rows" or "Released".
        place: of the piece among this owner's.
        part: this worker's own part of the sum; that of another is in the memory.
        payload: the factors of another, `rows` rows.
        ready: the event after which this worker's own part or factors may be read.
    """

    worker: int
    kind: str
    place: int
    part: Tensor | None = None
    rows: int = 0
    payload: Buffer = b""
    ready: Event = DONE


class Owner:
    """The pieces that one worker owns.

    Args:
        inner: the exchange between the owners of these pieces; this class calls it, and its owner
            closes it.
        device: of the tensors.
        by_factors: tensors that travel as factors.
        encoded: places of those whose parts a codec takes one by one.
        control: has the requests of rank 0.
        state: answers the others of the host.
    """

    def __init__(
        self,
        inner: Exchange,
        pieces: HostPieces,
        *,
        by_factors: frozenset[int],
        encoded: frozenset[int],
        group: HostGroup,
        memory: HostMemory,
        device: Device,
        control: JobControl,
        state: HostState,
    ) -> None:
        self._inner = inner
        self._pieces = pieces
        self._tensors = [pieces.all[number].of(pieces.tensor_of(number)) for number in pieces.own]
        self._encoded = encoded
        self._group = group
        self._memory = memory
        self._control = control
        self._state = state
        self.device = device
        tree = group.tree
        are_by_factors = [pieces.all[number].index in by_factors for number in pieces.own]
        self._contributions = Contributions(
            are_by_factors, [len(tree.parts(worker)) for worker in range(group.size)]
        )
        divisor = group.size if tree.averages else 1
        self.stacks: Mapping[int, FactorStack] = {
            place: FactorStack(trained.tensor, divisor=divisor)
            for place, trained in enumerate(self._tensors)
            if are_by_factors[place]
        }
        """The factors by place.

        The training loop puts this worker's own in before it contributes them.
        """
        self._parts: dict[int, list[Tensor]] = {}
        self.published = [0] * len(pieces.own)
        """How often each piece was published."""
        self.marks: list[Event] = [DONE] * len(pieces.own)
        self._received: list[Contribution] = []
        self._commands: deque[Callable[[], None]] = deque()
        self._is_idle = self._closing = self._stopped = False
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
        places = [self._placed(sender, piece) for piece in pieces]
        self._received += [Contribution(sender, "Parts", place) for place in places]

    def _note_rows(self, sender: int, fields: Sequence[int], payload: Buffer) -> None:
        place = self._placed(sender, fields[0], self.stacks)
        self._received.append(Contribution(sender, "Rows", place, rows=fields[1], payload=payload))

    def _note_released(self, sender: int, fields: Sequence[int], _: Buffer) -> None:
        self._received.append(Contribution(sender, "Released", self._placed(sender, fields[0])))

    def _placed(self, sender: int, piece: int, among: Container[int] | None = None) -> int:
        place = self._pieces.place.get(piece)
        if place is None or (among is not None and place not in among):
            raise RemoteProtocolError(
                f"a part came of piece {piece}, which this worker does not own"
            )
        return place

    def contribute(self, contributions: Sequence[Contribution]) -> None:
        """Take contributions of this worker itself."""
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
        ready, settled = self.device.event(), False

        def command() -> None:
            nonlocal settled
            self.device.wait(ready)
            step()
            self._publish_all()
            with self._group.monitor:
                settled = True
                self._group.monitor.notify()

        self._command(command)
        self._group.monitor.wait_for(
            lambda: settled or None, "the workers of this machine did not settle"
        )

    def finish(self) -> None:
        """Finish what needs nothing more of this worker. It still answers the others."""
        with self._group.monitor:
            self._closing = True
            self._group.monitor.notify()
        with contextlib.suppress(ServerError):
            self._group.monitor.wait_for(
                lambda: True if self._is_idle and not self._commands else None,
                "the iteration did not end",
                timeout_s=LEAVE_S,
            )

    def stop(self) -> None:
        """End the thread."""
        with self._group.monitor:
            self._stopped = True
            self._group.monitor.notify()
        if self._thread.ident is not None:
            self._thread.join(LEAVE_S)

    def _command(self, command: Callable[[], None]) -> None:
        with self._group.monitor:
            self._group.monitor.check()
            self._commands.append(command)
            self._group.monitor.notify()

    def _run(self) -> None:
        prepare_thread()
        try:
            with self.device.on(self.device.stream()):
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
            return (None,) if self._stopped or self._group.monitor.failure else None

        with self._group.monitor:
            self._is_idle = True
            self._group.monitor.notify()
        command = self._group.monitor.wait_for(found, "no command came", limited=False)[0]
        self._is_idle = False
        return command

    def _next_contributions(self) -> Sequence[Contribution]:
        """Return what has come, in order; nothing where this worker leaves and still owes its own."""
        rank, owes = self._group.rank, self._contributions.owes

        def found() -> list[Contribution] | None:
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
        self._inner.start(step.iteration, *step.rates)
        self._contributions.start()
        while not self._contributions.complete:
            came = self._next_contributions()
            if not came:
                return
            for contribution in came:
                self.device.wait(contribution.ready)
                self._take(contribution)
        self._inner.finish()
        self._publish_all()

    def _publish_all(self) -> None:
        """Publish the pieces in order, small ones together."""
        start = elements = 0
        for place, piece in enumerate(self._pieces.own):
            self._inner.wait(place)
            value = self._tensors[place].tensor.detach().view(-1)
            self._memory.values[piece].copy_(value, non_blocking=True)
            elements += value.numel()
            stop = place + 1
            is_full = elements >= LEAST_ELEMENTS or stop - start == MOST_PIECES
            if is_full or stop == len(self._pieces.own):
                self._publish(start, stop)
                start, elements = stop, 0

    def _publish(self, start: int, stop: int) -> None:
        group, mark = self._group, self.device.event()
        mark.synchronize()
        requests = len(self._control.requests)
        group.send(group.others, "Values", requests, *self._pieces.own[start:stop])
        with self._group.monitor:
            for place in range(start, stop):
                self.published[place] += 1
                self.marks[place] = mark
            self._group.monitor.notify()

    def _take(self, contribution: Contribution) -> None:
        worker, place = contribution.worker, contribution.place
        match contribution.kind:
            case "Parts":
                if contribution.part is not None:
                    self._parts.setdefault(place, []).append(contribution.part)
                if self._contributions.note(place, worker):
                    self._begin(place)
            case "Rows":
                if worker != self._group.rank:
                    self.stacks[place].add(worker, contribution.rows, contribution.payload)
                if self._contributions.note(place, worker):
                    self._begin_factors(place)
            case _:
                if self._contributions.note(place, worker, release=True):
                    self._inner.release(place)

    def _begin(self, place: int) -> None:
        trained, piece, group = self._tensors[place], self._pieces.own[place], self._group
        own = self._parts.pop(place)
        parts = [
            own
            if worker == group.rank
            else [
                part.to(own[0].device, non_blocking=True)
                for part in self._memory.parts(piece, worker)
            ]
            for worker in range(group.size)
        ]
        for part in own:
            self.device.keep(part)
        for total in group.tree.sums(parts, encoded=place in self._encoded):
            if self._memory.on_gpus and not any(total is part for part in own):
                total = total.clone()  # its place is free for the next part once the value is out
            self._inner.begin(place, total.view(trained.tensor.shape))

    def _begin_factors(self, place: int) -> None:
        u_RN, v_RM = self.stacks[place].take()
        if u_RN.shape[0]:
            self._inner.begin_factors(place, u_RN, v_RM)
