"""The thread that speaks for a machine: it alone uses the inner exchange's tensors (`leader.py` says why).

Law: it calls the inner exchange in the order in which a loop of one worker would: start, wait for each tensor and
publish it, begin each as soon as all parts are here, finish.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from poseidon.exchange.base import Exchange, Trained
from poseidon.exchange.local.connection import Connection, Kind, send_all
from poseidon.exchange.local.contributions import Contributions, FactorStack
from poseidon.exchange.local.control import LeaderDelivery
from poseidon.exchange.local.reduction import Reduction
from poseidon.exchange.side_stream import Event, SideStream
from ps_server import PeerLost, ServerError
from ps_server.errors import as_server_error
from ps_server.monitor import Monitor

LEAVE_S = 2.0
"""How long it has, when the exchange closes, to end an iteration that the others have not finished yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What a worker of the machine hands in.

    Args:
        kind: PART, FACTORS, RELEASED, TAKEN or LEAVE.
        worker: its local rank.
        index: the tensor.
        rows: of the factors.
        packed: the factors of another worker; None: the leader's, which are in their stack.
        part: the leader's part.
        event: after which the leader's part or factors may be read.
    """

    kind: Kind
    worker: int
    index: int = 0
    rows: int = 0
    packed: bytearray | None = None
    part: Tensor | None = None
    event: Event = None


class Engine:
    """The engine and what it is told.

    Args:
        inner: joins the machines.
        tensors: what to keep together.
        by_factors: indices of the tensors that travel as factors.
        connections: of the other workers.
        control: passes requests on, to the other hosts and to the other workers.
        reduction: how tensors move within the machine.
        monitor: guards the state that the threads of this worker share.
        failed: told why it cannot go on.
    """

    def __init__(
        self,
        inner: Exchange,
        tensors: Sequence[Trained],
        *,
        by_factors: AbstractSet[int],
        connections: Sequence[Connection],
        control: LeaderDelivery,
        reduction: Reduction,
        monitor: Monitor,
        failed: Callable[[ServerError], None],
    ) -> None:
        self._inner = inner
        self._tensors = tensors
        self._connections = connections
        self._control = control
        self._reduction = reduction
        self._monitor = monitor
        self._failed = failed
        self._workers = len(connections) + 1
        device = tensors[0].tensor.device if tensors else torch.device("cpu")
        self.side = SideStream(device)
        self._contributions = Contributions(
            [index in by_factors for index in range(len(tensors))], self._workers
        )
        self.stacks = {
            index: FactorStack(shape[0], shape[1], workers=self._workers, device=device)
            for index, shape in enumerate(trained.tensor.shape for trained in tensors)
            if index in by_factors
        }
        """Where the leader puts its own factors before it gives them."""
        self._own: dict[int, Tensor] = {}
        self._published = [0] * len(tensors)
        self._marks: list[Event] = [None] * len(tensors)
        self._arrived: deque[Contribution] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._left: set[int] = set()
        self._settled = 0
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="local-engine", daemon=True)
        self._thread.start()

    # -- calls of other threads ----------------------------------------------------------------------------

    def contribute(self, contribution: Contribution) -> None:
        """Something that a worker hands in."""
        with self._monitor:
            self._arrived.append(contribution)
            self._monitor.notify()

    def iterate(self, iteration: int, rate: float) -> None:
        """Begin an iteration once the last one has ended; returns at once."""
        self._command(lambda: self._iterate(iteration, rate))

    def together(self, step: Callable[[], None]) -> None:
        """Do `step`, publish what every tensor has become; return once all workers have taken it."""
        settled = self._settled + 1
        self._command(lambda: self._settle(step))
        self._monitor.wait_for(
            lambda: True if self._settled == settled else None, "the workers of this machine did not settle"
        )

    def wait(self, index: int, publication: int) -> None:
        """Wait until a tensor has been published so many times, and may be used by the current stream."""
        self._monitor.wait_for(
            lambda: True if self._published[index] >= publication else None,
            f"tensor '{self._tensors[index].name}' did not come",
        )
        self.side.join(self._marks[index])

    def leave(self) -> None:
        """End what can be ended without the others, and stop."""
        with self._monitor:
            self._leaving = True
            self._monitor.notify()
        self._thread.join(LEAVE_S)
        self._monitor.close()
        self._thread.join(LEAVE_S)

    def _command(self, command: Callable[[], None]) -> None:
        with self._monitor:
            self._monitor.check()
            self._commands.append(command)
            self._monitor.notify()

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self.side.after(None):
                while (command := self._next_command()) is not None:
                    command()
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: its owner raises the error
            self._failed(as_server_error(error, "the worker that leads its machine failed"))

    def _next_command(self) -> Callable[[], None] | None:
        """Wait for the next command; None: there will be none."""

        def found() -> tuple[Callable[[], None] | None] | None:
            if self._commands:
                return (self._commands.popleft(),)
            return (None,) if self._leaving or self._monitor.failure else None

        return self._monitor.wait_for(found, "no command came", limited=False)[0]

    def _next_contribution(self, owes: Callable[[int], bool]) -> Contribution | None:
        """Wait for the next contribution; None: there is none, as this worker leaves and its own part is missing."""
        while True:
            for worker in sorted(self._left):
                if owes(worker) and not owes(0):  # the leader may be about to leave as well
                    raise PeerLost(f"worker {worker} of this machine has left before the end")
            self._monitor.wait_for(
                lambda: True if self._arrived or (self._leaving and owes(0)) else None,
                "not every worker of this machine has finished the iteration",
                limited=not owes(0),  # the loop of this worker may take its time
            )
            if not self._arrived:
                return None
            contribution = self._arrived.popleft()
            if contribution.kind is not Kind.LEAVE:
                return contribution
            self._left.add(contribution.worker)

    def _iterate(self, iteration: int, rate: float) -> None:
        self._inner.start(iteration, rate)
        self._control.submit()
        self._publish_all()
        self._contributions.start()
        while not self._contributions.complete:
            contribution = self._next_contribution(self._contributions.owes)
            if contribution is None:
                return
            with self.side.after(contribution.event):
                self._take(contribution)
        self._inner.finish()

    def _settle(self, step: Callable[[], None]) -> None:
        step()
        self._publish_all()
        owing = set(range(1, self._workers))
        while owing:
            contribution = self._next_contribution(owing.__contains__)
            assert contribution is not None, "the leader takes nothing"
            if contribution.kind is not Kind.TAKEN:
                raise _unexpected(contribution)
            owing.discard(contribution.worker)
        with self._monitor:
            self._settled += 1
            self._monitor.notify()

    def _publish_all(self) -> None:
        for index in range(len(self._tensors)):
            self._inner.wait(index)
            self._reduction.publish(index)
            self._control.announce()
            send_all(self._connections, Kind.VALUE, index=index)
            with self._monitor:
                self._published[index] += 1
                self._marks[index] = self.side.mark()
                self._monitor.notify()

    def _take(self, contribution: Contribution) -> None:
        index = contribution.index
        match contribution.kind:
            case Kind.PART:
                if contribution.part is not None:
                    self._own[index] = contribution.part
                    self._reduction.contribute(index, contribution.part)
                if self._contributions.contribute(index, contribution.worker):
                    for due in self._reduction.due(index):
                        self._begin_inner(due)
            case Kind.FACTORS:
                if contribution.packed is not None:
                    self.stacks[index].add(contribution.worker, contribution.rows, contribution.packed)
                if self._contributions.contribute(index, contribution.worker):
                    self._begin_inner_factors(index)
            case Kind.RELEASED:
                if self._contributions.release(index, contribution.worker):
                    self._inner.release(index)
            case _:
                raise _unexpected(contribution)

    def _begin_inner(self, index: int) -> None:
        mean = self._reduction.mean(index, self._own.pop(index))
        if mean.is_cuda:
            mean.record_stream(torch.cuda.current_stream(mean.device))
        if self._tensors[index].statistics:
            assert mean.data_ptr() == self._tensors[index].tensor.data_ptr(), "summed where they are"
        else:
            self._inner.begin(index, mean.view(self._tensors[index].tensor.shape))

    def _begin_inner_factors(self, index: int) -> None:
        u_RN, v_RM = self.stacks[index].take()
        if u_RN.shape[0]:
            self._inner.begin_factors(index, u_RN, v_RM)


def _unexpected(contribution: Contribution) -> PeerLost:
    return PeerLost(f"worker {contribution.worker} sent an unexpected {contribution.kind.name}")
