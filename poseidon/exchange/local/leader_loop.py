"""The thread on which a leader calls the exchange between hosts (`leader.py` says why it needs
one).

Law: it calls the inner exchange in the order in which the training loop of a single worker would:
start, begin each tensor as soon as all parts of it have come, finish, wait for each and publish it.
So a worker of the host may use the values of the next iteration before the leader starts it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch
from torch import Tensor

from poseidon.exchange.base import Trained
from poseidon.exchange.carrier import Step
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.local.connection import Connection, Kind, Message, send_all
from poseidon.exchange.local.contributions import Contributions, FactorStack
from poseidon.exchange.local.group import HostTree
from poseidon.exchange.local.host_delivery import LeaderDelivery
from poseidon.exchange.local.reduction import Reduction
from poseidon.exchange.side_stream import Event, SideStream
from ps_server import PeerLost, ServerError
from ps_server.errors import as_server_error
from ps_server.monitor import Monitor
from ps_server.numerics import prepare_thread

LEAVE_S = 2.0
"""Longest time, when the exchange closes, to finish an iteration that other workers are still
in.
"""


class Contribution(NamedTuple):
    """What one worker of the host contributes.

    Attributes:
        worker: its local rank.
        message: PART, FACTORS, RELEASED, TAKEN or LEAVE. The leader's factors are in their stack.
        part: the leader's part of the sum; a follower's is in the reduction.
        ready: the event after which the leader's part or factors may be read.
    """

    worker: int
    message: Message
    part: Tensor | None = None
    ready: Event = None


class LeaderLoop:
    """The leader's loop: takes the contributions of all workers of the host, and calls the inner
    exchange.

    Args:
        connections: to the followers, by local rank.
        control: passes requests on to the other hosts and to the followers.
        failed: called with the error that ends the loop.
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
        tree: HostTree,
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
            [index in by_factors for index in range(len(tensors))],
            [len(tree.parts(worker)) for worker in range(self._workers)],
        )
        self._averages = tree.averages
        divisor = self._workers if tree.averages else 1
        self.stacks = {
            index: FactorStack(shape[0], shape[1], divisor=divisor, device=device)
            for index, shape in enumerate(trained.tensor.shape for trained in tensors)
            if index in by_factors
        }
        """The factors by tensor.

        The training loop puts the leader's own in before it contributes them.
        """
        self._own: dict[int, list[Tensor]] = {}
        self._published = [0] * len(tensors)
        self._marks: list[Event] = [None] * len(tensors)
        self._received: deque[Contribution] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._left: set[int] = set()
        self._settled = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="local-leader-loop", daemon=True)
        self._thread.start()

    def contribute(self, contribution: Contribution) -> None:
        """Take the contribution of a worker of the host."""
        with self._monitor:
            self._received.append(contribution)
            self._monitor.notify()

    def iterate(self, step: Step) -> None:
        """Begin an iteration once the last one has ended; return at once."""
        self._command(lambda: self._iterate(step))

    def settle(self, step: Callable[[], None]) -> None:
        """Run `step`, then publish every tensor.

        Return once all workers of the host have the values.

        Args:
            step: `open` or `settle` of the inner exchange.
        """
        settled = self._settled + 1
        self._command(lambda: self._settle(step))
        self._monitor.wait_for(
            lambda: True if self._settled == settled else None,
            "the workers of this machine did not settle",
        )

    def wait(self, index: int, publication: int) -> None:
        """Wait until a tensor has been published `publication` times, and the current stream may
        use it.
        """
        self._monitor.wait_for(
            lambda: True if self._published[index] >= publication else None,
            f"tensor '{self._tensors[index].name}' did not come",
        )
        self.side.wait_event(self._marks[index])

    def close(self) -> None:
        """Finish what needs no other worker, and stop."""
        with self._monitor:
            self._closing = True
            self._monitor.notify()
        self._thread.join(LEAVE_S)
        self._monitor.close()
        self._thread.join(LEAVE_S)

    def _command(self, command: Callable[[], None]) -> None:
        with self._monitor:
            self._monitor.check()
            self._commands.append(command)
            self._monitor.notify()

    def _run(self) -> None:
        prepare_thread()
        try:
            with self.side.after(None):
                while (command := self._next_command()) is not None:
                    command()
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: its owner raises the error
            self._failed(as_server_error(error, "the worker that leads its machine failed"))

    def _next_command(self) -> Callable[[], None] | None:
        """Wait for the next command. Return None when there will be none."""

        def found() -> tuple[Callable[[], None] | None] | None:
            if self._commands:
                return (self._commands.popleft(),)
            return (None,) if self._closing or self._monitor.failure else None

        return self._monitor.wait_for(found, "no command came", limited=False)[0]

    def _next_contribution(self, owes: Callable[[int], bool]) -> Contribution | None:
        """Return the next contribution; None where this worker leaves and still owes its own.

        Args:
            owes: whether a contribution of this local rank is still to come.
        """
        while True:
            for worker in sorted(self._left):
                if owes(worker) and not owes(0):  # the leader may be about to close, too
                    raise PeerLost(f"worker {worker} of this machine has left before the end")
            self._monitor.wait_for(
                lambda: True if self._received or (self._closing and owes(0)) else None,
                "not every worker of this machine has finished the iteration",
                limited=not owes(0),  # the training loop of this worker may take any time
            )
            if not self._received:
                return None
            contribution = self._received.popleft()
            if contribution.message.kind is not Kind.LEAVE:
                return contribution
            self._left.add(contribution.worker)

    def _iterate(self, step: Step) -> None:
        self._inner.start(step.iteration, *step.rates)
        self._contributions.start()
        while not self._contributions.complete:
            contribution = self._next_contribution(self._contributions.owes)
            if contribution is None:
                return
            with self.side.after(contribution.ready):
                self._take(contribution)
        self._inner.finish()
        self._control.submit()
        self._publish_all()

    def _settle(self, step: Callable[[], None]) -> None:
        self._control.wait_until_passed_on()
        step()
        self._publish_all()
        owing = set(range(1, self._workers))
        ahead: list[Contribution] = []  # of followers that have begun the next iteration
        while owing:
            contribution = self._next_contribution(owing.__contains__)
            assert contribution is not None, "the leader itself owes nothing"
            if contribution.worker not in owing:
                ahead.append(contribution)
            elif contribution.message.kind is not Kind.TAKEN:
                raise _unexpected(contribution)
            owing.discard(contribution.worker)
        with self._monitor:
            self._received.extendleft(reversed(ahead))
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
                self._marks[index] = self.side.record_event()
                self._monitor.notify()

    def _take(self, contribution: Contribution) -> None:
        worker, message = contribution.worker, contribution.message
        index = message.index
        match message.kind:
            case Kind.PART:
                if contribution.part is not None:
                    self._own.setdefault(index, []).append(contribution.part)
                    self._reduction.contribute(index, contribution.part)
                if self._contributions.contribute(index, worker):
                    for due in self._reduction.due(index):
                        self._begin_inner(due)
            case Kind.FACTORS:
                if worker:
                    self.stacks[index].add(worker, message.number, message.payload)
                if self._contributions.contribute(index, worker):
                    self._begin_inner_factors(index)
            case Kind.RELEASED:
                if self._contributions.release(index, worker):
                    self._inner.release(index)
            case _:
                raise _unexpected(contribution)

    def _begin_inner(self, index: int) -> None:
        for total in self._reduction.sums(index, self._own.pop(index)):
            if total.is_cuda:
                total.record_stream(torch.cuda.current_stream(total.device))
            if self._tensors[index].statistics and self._averages:
                assert total.data_ptr() == self._tensors[index].tensor.data_ptr(), (
                    "statistics are averaged in place"
                )
            else:
                self._inner.begin(index, total.view(self._tensors[index].tensor.shape))

    def _begin_inner_factors(self, index: int) -> None:
        u_RN, v_RM = self.stacks[index].take()
        if u_RN.shape[0]:
            self._inner.begin_factors(index, u_RN, v_RM)


def _unexpected(contribution: Contribution) -> PeerLost:
    return PeerLost(
        f"worker {contribution.worker} sent an unexpected {contribution.message.kind.name}"
    )
