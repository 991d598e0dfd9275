"""The launcher of a job in a simulated world: the one process that blocks in its main thread.

Its code waits with events, conditions and queues. Here these let simulated time pass until what is
waited for has come. What its threads do between two waits runs as loops of a simulated process.
Threads that block are `BatonThread`s, in the launcher as in other processes.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from poseidon.cluster.agent import questions, remote, remote_process
from poseidon.cluster.agent.messages import Heartbeat
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.supervision import loop
from poseidon.errors import JobError
from poseidon.launcher import site
from tests.simulation.network import End, Fabric
from tests.simulation.processes import Process
from tests.simulation.threads import BatonThread, Lock
from tests.simulation.world import Violation, World

FOR_EVER_S = 1e6
STRETCH = 4
"""A wait for messages may last so many times as long: the launcher is busy."""


class Primitives:
    """The modules `time`, `threading` and `queue` of a world's processes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.process = Process(world, "launcher")
        self.limit_s = math.inf
        """When the job must have ended."""
        self.time = SimpleNamespace(
            monotonic=world.clock,
            perf_counter=world.clock,
            perf_counter_ns=lambda: int(1e9 * world.now),
            sleep=lambda seconds: self.wait(lambda: False, seconds),
        )
        self.threading = SimpleNamespace(
            Lock=Lock,
            RLock=Lock,
            Event=lambda: _Event(self),
            Condition=lambda lock=None: _Condition(self),
            Thread=self.thread,
            TIMEOUT_MAX=threading.TIMEOUT_MAX,
        )
        self.launcher_threading = SimpleNamespace(**{**self.threading.__dict__, "Thread": _Thread})
        """Of the modules whose threads run as loops."""
        self.queue = SimpleNamespace(
            Queue=lambda most=0: _Queue(self),
            SimpleQueue=lambda: _Queue(self),
            Empty=queue.Empty,
            Full=queue.Full,
        )

    @property
    def current(self) -> Process:
        """The process whose thread runs; the launcher's, if it is not a `BatonThread`."""
        running = self.world.running
        return self.process if running is None else running.process

    def wait(self, question: Callable[[], object], timeout_s: float | None) -> bool:
        """Let time pass until a question is answered with yes; return whether it was in time."""
        world = self.world
        seconds = FOR_EVER_S if timeout_s is None else min(timeout_s, FOR_EVER_S)
        if world.running is not None:
            return bool(question()) or world.running.wait(question, seconds)
        if world.now > self.limit_s:
            raise Violation("the job does not end")
        if self.process.stopped_s:  # it sees nothing
            world.run(lambda: False, self.process.stopped_s)
        return world.run(question, seconds)

    def thread(
        self,
        target: Callable[..., object],
        args: Sequence[object] = (),
        name: str | None = None,
        **_: object,
    ) -> BatonThread:
        """Return what stands for a thread of the process that runs."""
        return self.thread_in(self.current, partial(target, *args), name)

    def thread_in(
        self, process: Process, target: Callable[[], object], name: str | None = None
    ) -> BatonThread:
        """Return what stands for a thread of a process."""
        return BatonThread(process, target, self.wait, name)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let the launcher's modules use them."""
        places = ((remote, ("time", "queue")), (loop, ("time", "queue")))
        with contextlib.ExitStack() as stack:
            for module, names in places:
                for name in names:
                    stack.enter_context(patch.object(module, name, getattr(self, name)))
            for module in (remote, remote_process, questions, loop):
                stack.enter_context(patch.object(module, "threading", self.launcher_threading))
            stack.enter_context(patch.object(remote, "owned_thread", lambda *_: _Thread()))
            stack.enter_context(patch.object(site, "for_each_host", _one_after_the_other))
            stack.enter_context(patch.object(site, "close_agents", _close_all))
            stack.callback(lambda: [thread.close() for thread in self.world.threads])
            yield


def _one_after_the_other(work: Callable[[Any], Any], hosts: Sequence[Any], *, name: str) -> Any:
    outcomes: list[object] = []
    for host in hosts:
        try:
            outcomes.append(work(host))
        except JobError as error:
            outcomes.append(error)
    return outcomes


def _close_all(agents: Sequence[RemoteAgent]) -> None:
    for agent in dict.fromkeys(agents):
        agent.close()


class _Event:
    def __init__(self, primitives: Primitives) -> None:
        self._primitives = primitives
        self._process = primitives.current
        self._set = False

    def set(self) -> None:
        self._set = self._process.changed = True

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._primitives.wait(self.is_set, timeout_s)


class _Condition(Lock):
    def __init__(self, primitives: Primitives) -> None:
        self._primitives = primitives
        self._process = primitives.current
        self._notified = 0

    def wait_for(self, question: Callable[[], object], timeout_s: float | None = None) -> bool:
        return self._primitives.wait(question, timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        before = self._notified
        return self._primitives.wait(lambda: self._notified > before, timeout_s)

    def notify(self) -> None:
        self._notified += 1
        self._process.changed = True

    notify_all = notify


class _Thread:
    """Stands for a thread whose work is a loop of the launcher's process."""

    ident = 1

    def __init__(self, **_: object) -> None:
        self.over: Callable[[], bool] = lambda: True
        self.primitives: Primitives | None = None

    def start(self) -> None:
        pass

    def is_alive(self) -> bool:
        return not self.over()

    def join(self, timeout_s: float | None = None) -> None:
        if self.primitives is not None:
            self.primitives.wait(self.over, timeout_s)


class _Queue:
    def __init__(self, primitives: Primitives) -> None:
        self._primitives = primitives
        self._process = primitives.current
        self._items: deque[Any] = deque()
        self.on_put: Callable[[], None] = lambda: None

    def put(self, item: object, timeout: float | None = None) -> None:
        self._items.append(item)
        self._process.changed = True
        self.on_put()

    put_nowait = put

    def empty(self) -> bool:
        return not self._items

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def get(self, timeout: float | None = None) -> Any:
        stretched_s = None if timeout is None else STRETCH * timeout
        self._primitives.wait(lambda: self._items, stretched_s)
        return self.get_nowait()


class SimulatedChannel:
    """One end of a channel between launcher and agent; see `Channel`."""

    def __init__(self, fabric: Fabric, end: End, far: str) -> None:
        self.end = end
        self._fabric = fabric
        self._far = far

    @property
    def full(self) -> bool:
        """Whether `send` would wait."""
        return self.open and self._fabric.link(self.end.name, self._far).full

    @property
    def open(self) -> bool:
        """Whether it can be sent to."""
        return self.end.open and not self.end.lost

    @property
    def ready(self) -> bool:
        """Whether `receive` returns at once."""
        return bool(self.end.inbox or self.end.lost)

    def send(self, message: bytes) -> None:
        """See `Channel`."""
        if not self.open:
            raise OSError("the channel is closed")
        self._fabric.link(self.end.name, self._far).send([message])

    def receive(self) -> bytes | None:
        """See `Channel`."""
        taken = self.end.take(1)
        return bytes(taken[0][1][0]) if taken else None

    def close(self) -> None:
        """See `Channel`."""
        self._fabric.close(self.end)


def dial(primitives: Primitives, channel: SimulatedChannel, label: str) -> RemoteAgent:
    """Connect the launcher to an agent.

    Raises:
        JobError: it does not answer.
    """
    agent = RemoteAgent(channel, label)
    over = lambda: agent.lost is not None  # noqa: E731
    for thread in agent._threads:
        thread.over, thread.primitives = over, primitives  # type: ignore[attr-defined]
    process = primitives.process

    def failed(error: Exception) -> None:
        agent._lose(f"its connection failed: {type(error).__name__}: {error}")

    receiving = process.loop(_receive(agent, channel), failed, lambda: None)
    sending = process.loop(_send(agent, channel, process.world), failed, lambda: None)
    agent._requests.on_put = sending.wake  # type: ignore[attr-defined]
    channel.end.loop, channel.end.sending = receiving, sending
    agent.connect()
    return agent


def _receive(agent: RemoteAgent, channel: SimulatedChannel) -> Iterator[float]:
    while True:
        while channel.ready:
            if not agent._receive_one():
                return
        yield FOR_EVER_S


def _send(agent: RemoteAgent, channel: SimulatedChannel, world: World) -> Iterator[float]:
    waits_since_s = world.now
    while agent.lost is None and not agent.closed:
        if not channel.full:
            request, waited_s = None, world.now - waits_since_s
            with contextlib.suppress(queue.Empty):
                request = agent._requests.get_nowait()
            if request is not None or waited_s >= remote.HEARTBEAT_S / 2:
                waits_since_s = world.now
                if not agent._send_one(request or Heartbeat()):
                    return
                if request is not None:
                    continue
        yield min(math.inf, remote.HEARTBEAT_S / 2)
