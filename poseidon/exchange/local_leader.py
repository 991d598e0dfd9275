"""The worker that speaks for all workers of its machine (`local_group.py` has the laws).

Threads: the loop's own; one that listens to each other worker; one for collections (`local_meetings.py`); and the engine,
which alone uses the inner exchange's tensors, in the order in which a loop of one worker would: start, wait for
each tensor and publish it, begin each as soon as all parts are here, finish. Tensors belong to the exchange while the
engine waits for them, so the leader's loop needs no copy: it waits until the engine has published.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poseidon.exchange.base import Ask, Exchange, History, Trained
from poseidon.exchange.contributions import Contributions, FactorStack
from poseidon.exchange.local_group import LocalGroup, pack_signals
from poseidon.exchange.local_line import Kind, Line, Message, accept, refuse, tell
from poseidon.exchange.local_meetings import Meetings
from poseidon.exchange.reduction import Hello, Means, offer, usual_means
from poseidon.exchange.siblings import Siblings
from poseidon.exchange.side_stream import Event, SideStream
from ps_server import PeerLost, ServerError, Signal, SignalKind

LEAVE_S = 2.0
"""How long the engine has, when the exchange closes, to end an iteration that the others have not finished yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """A message of a worker, as the engine takes it."""

    kind: Kind
    worker: int
    index: int = 0
    rows: int = 0
    packed: bytearray | None = None
    part: Tensor | None = None
    event: Event = None


class LeaderExchange:
    """See `Exchange`.

    Args:
        inner: joins the machines; its replicas are machines. This exchange closes it.
        tensors: what to keep together, the same on all workers.
        group: this worker's place.
        means: how tensors move within the machine; None: the usual one for their devices.
        tells_histories: the other workers call `histories` too, and hear the leader's (staleness > 0, where every
            worker brings a history to a snapshot).
    """

    def __init__(
        self,
        inner: Exchange,
        tensors: Sequence[Trained],
        group: LocalGroup,
        *,
        means: Means | None = None,
        tells_histories: bool = False,
    ) -> None:
        self._inner = inner
        self._tensors = tensors
        self._flat = [trained.tensor.detach().view(-1) for trained in tensors]
        device = self._flat[0].device if tensors else torch.device("cpu")
        self._side = SideStream(device)
        self._workers = group.workers
        self._tells_histories = tells_histories
        self._siblings = Siblings(group.timeout_s)
        self._by_factors = [not t.statistics and inner.takes_factors(i) for i, t in enumerate(tensors)]
        try:
            self._welcome(group, means)
        except ServerError:
            inner.close()
            raise
        self._contributions = Contributions(self._by_factors, group.workers)
        self._stacks = {
            index: FactorStack(shape[0], shape[1], workers=group.workers, device=device)
            for index, shape in enumerate(trained.tensor.shape for trained in tensors)
            if self._by_factors[index]
        }
        self._own: dict[int, Tensor] = {}
        self._published = [0] * len(tensors)
        self._used = [0] * len(tensors)
        self._marks: list[Event] = [None] * len(tensors)
        self._round = 0
        self._begun: set[int] = set()
        self._released: set[int] = set()
        self._told: tuple[Signal, ...] = ()
        self._given: deque[_Given] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._leaving = False
        self._done = 0
        self._left: set[int] = set()
        self._meetings = Meetings(inner, self._lines, self._siblings, self._fail)
        self._engine = threading.Thread(target=self._run, name="local-engine", daemon=True)
        self._engine.start()
        self._listeners = [
            threading.Thread(target=self._listen, args=(worker, line), name=f"local-{worker}", daemon=True)
            for worker, line in enumerate(self._lines, start=1)
        ]
        for listener in self._listeners:
            listener.start()

    def _welcome(self, group: LocalGroup, means: Means | None) -> None:
        own = Hello.of(self._tensors)
        devices = [own.device]

        def check(message: Message) -> None:
            hello = Hello.unpack(message.payload)
            devices.append(hello.device)
            if hello.sizes != own.sizes:
                raise PeerLost(f"worker {message.number} of this machine has other tensors than its leader")

        self._lines = accept(group.address, group.workers - 1, group.timeout_s, check)
        try:
            offered = offer(self._tensors, group, means or usual_means(devices), self._by_factors)
            for line in self._lines:
                line.send(Kind.WELCOME, offered.welcome.pack(), files=offered.files)
            self._reduction = offered.accepted()
        except ServerError as error:
            refuse(self._lines, error)
            raise

    # -- the contract --------------------------------------------------------------------------------------

    def open(self, histories: Sequence[History] | None) -> None:
        """See `Exchange`."""
        self._together(lambda: self._inner.open(histories))

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._begun.clear()
        self._released.clear()
        self._round += 1
        self._command(lambda: self._iterate(iteration, rate))

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""
        self._begin(index, gradient.detach().reshape(-1))

    def takes_factors(self, index: int) -> bool:
        """See `Exchange`."""
        return self._by_factors[index]

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """See `Exchange`."""
        if not self._by_factors[index]:
            self.begin(index, u_KN.detach().t() @ v_KM.detach())
            return
        self.wait(index)
        self._begun.add(index)
        self._stacks[index].own(u_KN.detach(), v_KM.detach())
        self._give(_Given(kind=Kind.FACTORS, worker=0, index=index, event=self._side.mark()))

    def release(self, index: int) -> None:
        """See `Exchange`."""
        if self._by_factors[index] and index not in self._released:
            self._released.add(index)
            self._give(_Given(kind=Kind.RELEASED, worker=0, index=index, event=self._side.mark()))

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        if self._used[index] == self._round:
            return
        self._siblings.until(
            lambda: True if self._published[index] >= self._round else None,
            f"tensor '{self._tensors[index].name}' did not come",
        )
        self._used[index] = self._round
        self._side.join(self._marks[index])
        self._reduction.published(index)

    def finish(self) -> None:
        """See `Exchange`."""
        for index, trained in enumerate(self._tensors):
            if trained.statistics:
                self._begin(index, self._flat[index])
            elif self._by_factors[index]:
                if index not in self._begun:
                    self._give(_Given(kind=Kind.FACTORS, worker=0, index=index))
                self.release(index)
            elif index not in self._begun:
                self._begin(index, torch.zeros_like(self._flat[index]))

    def settle(self) -> None:
        """See `Exchange`."""
        self._together(self._inner.settle)

    def histories(self) -> list[History]:
        """See `Exchange`."""
        found = self._inner.histories()
        if self._tells_histories:
            arrays = [array.reshape(-1).data for history in found for array in history]
            tell(self._lines, Kind.HISTORIES, *arrays)
        return found

    def gather(self, payload: bytes) -> Ask:
        """See `Exchange`."""
        return self._meetings.ask(payload)

    def gathered(self, ask: Ask) -> tuple[bytes, ...]:
        """See `Exchange`."""
        return self._siblings.until(ask, "not every worker has come to a meeting")

    def signal(self, kind: SignalKind) -> None:
        """See `Exchange`."""
        self._inner.signal(kind)

    @property
    def signals(self) -> tuple[Signal, ...]:
        """See `Exchange`."""
        return self._inner.signals

    def close(self) -> None:
        """See `Exchange`."""
        if self._siblings.closing:
            return
        with self._siblings.changed:
            self._leaving = True
            self._siblings.changed.notify_all()
        self._engine.join(LEAVE_S)
        self._siblings.close()
        self._engine.join(LEAVE_S)
        self._meetings.close()
        tell(self._lines, Kind.LEAVE)
        for line in self._lines:
            line.close()
        for listener in self._listeners:
            listener.join()
        self._reduction.close()
        self._inner.close()

    # -- the loop's thread ---------------------------------------------------------------------------------

    def _begin(self, index: int, part: Tensor) -> None:
        self.wait(index)
        self._begun.add(index)
        self._give(_Given(kind=Kind.PART, worker=0, index=index, part=part, event=self._side.mark()))

    def _give(self, given: _Given) -> None:
        with self._siblings.changed:
            self._siblings.check()
            self._given.append(given)
            self._siblings.changed.notify_all()

    def _command(self, command: Callable[[], None]) -> None:
        with self._siblings.changed:
            self._siblings.check()
            self._commands.append(command)
            self._siblings.changed.notify_all()

    def _together(self, step: Callable[[], None]) -> None:
        """Let the engine do `step`, publish what every tensor has become, and wait until all have taken it."""
        self._round += 1
        done = self._done + 1

        def run() -> None:
            step()
            self._publish_all()
            owing = set(range(1, self._workers))
            while owing:
                owing.discard(self._next_given(owing.__contains__).worker)  # nothing but TAKEN can come now
            with self._siblings.changed:
                self._done = done
                self._siblings.changed.notify_all()

        self._command(run)
        self._siblings.until(
            lambda: True if self._done == done else None, "the workers of this machine did not settle"
        )
        for index in range(len(self._tensors)):
            self.wait(index)

    # -- the engine ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._side.after(None):
                while (command := self._next_command()) is not None:
                    command()
        except ServerError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: the loop must hear of it
            lost = PeerLost(f"the worker that leads its machine failed: {error!r}")
            lost.__cause__ = error
            self._fail(lost)

    def _next_command(self) -> Callable[[], None] | None:
        with self._siblings.changed:
            while not (self._commands or self._leaving or self._siblings.failure):
                self._siblings.changed.wait()
            return self._commands.popleft() if self._commands else None

    def _next_given(self, owes: Callable[[int], bool]) -> _Given:
        while True:
            for worker in sorted(self._left):
                if owes(worker):
                    raise PeerLost(f"worker {worker} of this machine has left before the end")
            given = self._siblings.until(
                lambda: self._given.popleft() if self._given else None,
                "not every worker of this machine has finished the iteration",
            )
            if given.kind is not Kind.LEAVE:
                return given
            self._left.add(given.worker)

    def _iterate(self, iteration: int, rate: float) -> None:
        self._inner.start(iteration, rate)
        self._publish_all()
        self._contributions.start()
        while not self._contributions.complete:
            given = self._next_given(self._contributions.owes)
            with self._side.after(given.event):
                self._take(given)
        self._inner.finish()

    def _publish_all(self) -> None:
        for index in range(len(self._tensors)):
            self._inner.wait(index)
            self._reduction.publish(index)
            signals = self._inner.signals
            if signals != self._told:
                tell(self._lines, Kind.SIGNALS, pack_signals(signals))
                self._told = signals
            tell(self._lines, Kind.VALUE, index=index)
            with self._siblings.changed:
                self._published[index] += 1
                self._marks[index] = self._side.mark()
                self._siblings.changed.notify_all()

    def _take(self, given: _Given) -> None:
        index = given.index
        match given.kind:
            case Kind.PART:
                if given.part is not None:
                    self._own[index] = given.part
                    self._reduction.give(index, given.part)
                if self._contributions.give(index, given.worker):
                    for due in self._reduction.due(index):
                        self._begin_inner(due)
            case Kind.FACTORS:
                if given.packed is not None:
                    self._stacks[index].add(given.worker, given.rows, given.packed)
                if self._contributions.give(index, given.worker):
                    self._begin_inner_factors(index)
            case Kind.RELEASED:
                if self._contributions.release(index, given.worker):
                    self._inner.release(index)
            case _:
                raise PeerLost(f"worker {given.worker} sent an unexpected {given.kind.name}")

    def _begin_inner(self, index: int) -> None:
        mean = self._reduction.total(index, self._own.pop(index)).div_(self._workers)
        if mean.is_cuda:
            mean.record_stream(torch.cuda.current_stream(mean.device))
        if self._tensors[index].statistics:
            assert mean.data_ptr() == self._flat[index].data_ptr(), "statistics are summed where they are"
        else:
            self._inner.begin(index, mean.view(self._tensors[index].tensor.shape))

    def _begin_inner_factors(self, index: int) -> None:
        u_RN, v_RM = self._stacks[index].take()
        if u_RN.shape[0]:
            self._inner.begin_factors(index, u_RN, v_RM)

    # -- the listeners -------------------------------------------------------------------------------------

    def _listen(self, worker: int, line: Line) -> None:
        try:
            while True:
                message = line.receive()
                if message.kind is Kind.GATHER:
                    self._meetings.contribute(worker, message.number, message.payload)
                    continue
                given = _Given(
                    kind=message.kind,
                    worker=worker,
                    index=message.index,
                    rows=message.number,
                    packed=message.payload,
                )
                with self._siblings.changed:
                    self._given.append(given)
                    self._siblings.changed.notify_all()
                if message.kind is Kind.LEAVE:
                    self._meetings.leave(worker)
                    return
        except ServerError as error:
            if not self._siblings.closing:
                self._fail(error)

    def _fail(self, error: ServerError) -> None:
        first = self._siblings.failure is None
        self._siblings.fail(error)
        if first:
            tell(self._lines, Kind.FAILED, str(error).encode())
