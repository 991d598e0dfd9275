"""Tasks of a scheduler that meet at rank 0: the rendezvous, its channels, and both ends of each
agent.

Checked: rank 0 and every task come to an end; where nothing was lost or refused, all tasks join,
each agent answers, and all tasks end with the status that rank 0 dismisses them with; a task that
does not belong there is named; a host on which the user kills the job is known to rank 0; a signal
to a task reaches rank 0; a task that has died is lost to rank 0, and rank 0 to its tasks.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from poseidon.cluster.agent import connection, questions, remote, remote_process
from poseidon.cluster.agent import host as agent_host
from poseidon.cluster.agent.host import Agent
from poseidon.cluster.agent.messages import Heartbeat, Join, Service
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial import channel, dialer, tasks
from poseidon.cluster.dial.tasks import Rendezvous, run_task
from poseidon.cluster.doctor import probe
from poseidon.errors import JobError
from poseidon.version import __version__
from ps_server import monitor
from ps_server.errors import PeerLost
from ps_server.transport.base import Frames
from tests.simulation.launcher import STRETCH, Primitives
from tests.simulation.network import End, Fabric
from tests.simulation.processes import STEP_S, Process
from tests.simulation.threads import BatonThread
from tests.simulation.world import Violation, World

RUN_S = 1000.0
JOIN_S = 60.0
NOTICED_S = 20.0 * STRETCH
"""Within which rank 0 hears of what has happened to a task, or a task of rank 0: a wait of a process
that is late counts as one that is not.
"""
BUSY = 10
"""How often rank 0 sends something to all while the event happens."""
EVENTS = (
    "",
    "",
    "",
    "user kill",
    "signal",
    "death",
    "stop",
    "rank 0 fails",
    "rank 0 dies",
    "silence",
)


@dataclass(kw_only=True)
class Run:
    """One run.

    Attributes:
        ended: what each task ended with, by its rank: a status or an error.
        agents: of the tasks, where they run.
        seen: the agents as rank 0 has them, by rank.
        signals: how many rank 0 has heard of.
        gathered: why rank 0 has no job; empty: all have joined; None: it waits.
    """

    world: World
    size: int
    event: str
    stranger: str
    primitives: Primitives
    fabric: Fabric
    listening: End
    processes: list[Process] = field(default_factory=list)
    ended: dict[int, int | JobError] = field(default_factory=dict)
    agents: dict[Process, Agent] = field(default_factory=dict)
    seen: dict[int, RemoteAgent] = field(default_factory=dict)
    signals: int = 0
    gathered: str | None = None
    struck: int = 0
    """The rank of the task that the event has happened to; 0: none."""
    over: bool = False

    def join_of(self, rank: int) -> Join:
        """Return what a task joins with."""
        return Join(
            version="older" if rank and self.stranger == "version" else __version__,
            rank=1 if rank == self.size - 1 and self.stranger == "twin" else rank,
            size=self.size + (bool(rank) and self.stranger == "size"),
            local_rank=0,
            address=f"10.0.0.{rank}",
            host=f"node{rank}",
        )

    def asked_to_end(self, leave: Callable[[], bool]) -> None:
        """Take a signal of a scheduler to a task."""
        self.signals += 1


def simulate(world: World) -> None:
    """Run a seed."""
    random = world.stream("settings")
    primitives, fabric = Primitives(world), Fabric(world)
    size = random.choice((2, 3, 4))
    run = Run(
        world=world,
        size=size,
        event=random.choice(EVENTS),
        stranger=random.choice(
            ("", "", "", "", "", "version", "size", "absent", "twin" * (size > 2))
        ),
        primitives=primitives,
        fabric=fabric,
        listening=fabric.end(primitives.process, "rank 0", relayed=True),
    )
    run.processes = [primitives.process]
    run.processes += [Process(world, f"task {rank}") for rank in range(1, size)]
    with _installed(run):
        for rank, process in enumerate(run.processes):
            if not (run.stranger == "absent" and rank == size - 1):
                work = _Rank(run, rank)
                world.after(
                    20 * random.random() if rank else 0.0,
                    lambda process=process, work=work: primitives.thread_in(
                        process, work.run
                    ).start(),
                )
        _plan_late_and_stops(run)
        world.run(lambda: run.over and len(run.ended) >= _alive(run), RUN_S)
    _judge(run)


def _alive(run: Run) -> int:
    return sum(process.alive for process in run.processes[1:]) - (run.stranger == "absent")


def _plan_late_and_stops(run: Run) -> None:
    random, world = run.world.stream("plan"), run.world
    for number in range(random.choice((0, 0, 1, 2))):
        process, at_s, for_s = random.choice(run.processes), random.random(), random.random()
        kind = random.choice(("stopped", "cut off"))
        act = process.stop if kind == "stopped" else lambda s, p=process: run.fabric.stall(p, s)
        if world.deviates(f"{process.name} {kind} ({number})"):
            world.after(40 * at_s, lambda act=act, for_s=for_s: act(3 * for_s))


class _Rank:
    """A task."""

    def __init__(self, run: Run, rank: int) -> None:
        self._run = run
        self._rank = rank
        self._random = run.world.stream(f"work {rank}")

    def run(self) -> None:
        """Do its work."""
        if self._rank:
            self._serve()
        else:
            self._lead()

    def _serve(self) -> None:
        run = self._run
        outcome: int | JobError
        try:
            outcome = run_task("tcp://rank 0", None, run.join_of(self._rank), JOIN_S)  # type: ignore[arg-type]
        except JobError as error:
            outcome = error
        run.ended[self._rank] = outcome

    def _lead(self) -> None:
        run, sleep = self._run, self._run.primitives.time.sleep
        try:
            with Rendezvous(
                "rank 0",
                1,
                None,  # type: ignore[arg-type]
                size=run.size,
                on_signal=run.asked_to_end,
            ) as rendezvous:
                hosts = rendezvous.gather(run.join_of(0), JOIN_S)
                run.gathered = ""
                run.seen = {host.first.rank: agent for host, agent in hosts}
                for agent in run.seen.values():
                    if "time" not in agent.ask(Service.LINKS, {"do": "clock"}):
                        raise Violation(f"{agent.label} does not answer")
                struck = self._random.randrange(1, run.size)
                run.world.after(self._random.random(), _happen, run, struck)
                for _ in range(BUSY):
                    sleep(0.2 * self._random.random())
                    for agent in run.seen.values():
                        agent._request(Heartbeat())
                sleep(1.0)
                if run.event == "rank 0 fails":
                    raise JobError("the job failed")
                sleep(NOTICED_S if run.event else 0.0)
                rendezvous.dismiss(3)
        except JobError as error:
            run.gathered = str(error) if run.gathered is None else run.gathered
        run.over = True


def _happen(run: Run, rank: int) -> None:
    """Let the event of the run happen, to a task."""
    process = run.processes[rank]
    if not run.event or not run.world.deviates(f"{run.event} of task {rank}"):
        run.event = ""
        return
    agent = run.agents.get(process)
    run.world.lossy = run.event not in ("signal", "rank 0 fails")
    if run.event == "user kill" and agent is not None:
        agent.killed_by_user()
    elif run.event == "signal" and agent is not None:
        agent.signaled("SIGTERM")
    elif run.event == "stop" and agent is not None:
        agent.stop("it was ended by SIGINT")
    elif run.event == "death":
        process.kill()
    elif run.event == "silence":
        run.fabric.stall(process, NOTICED_S)
    elif run.event == "rank 0 dies":
        run.over = True
        run.primitives.process.kill()
    process.world.after(STEP_S, process.ask_all)
    run.struck = rank


def _judge(run: Run) -> None:
    for thread in run.world.threads:
        if thread.error is not None:
            raise thread.error
    if not run.over:
        raise Violation(f"rank 0 does not end after {run.event}")
    waiting = [
        p.name for rank, p in enumerate(run.processes) if rank and p.alive and rank not in run.ended
    ]
    if waiting and not (run.stranger == "absent" and waiting == [run.processes[-1].name]):
        raise Violation(f"{waiting} do not end after {run.event or run.stranger}")
    if run.stranger:
        if not run.gathered:
            raise Violation(
                f"rank 0 has a job, though of {run.size} tasks one is wrong: {run.stranger}"
            )
        return
    if run.gathered:
        raise Violation(f"not all have joined: {run.gathered}")
    _judge_event(run)


def _judge_event(run: Run) -> None:
    event = run.event if run.struck else ""
    if event == "rank 0 dies":
        return
    if run.struck:
        agent = run.seen[run.struck]
        if event == "user kill" and not agent.killed_by_user:
            raise Violation(f"rank 0 does not know that the user has killed the job: {agent.lost}")
        if event == "signal" and run.signals != 1:
            raise Violation(f"rank 0 has heard of {run.signals} signals")
        if event in ("death", "silence", "stop") and agent.lost is None:
            raise Violation(f"rank 0 does not know of the {event} of rank {run.struck}")
    expected = 1 if event == "rank 0 fails" else 3
    for rank, outcome in run.ended.items():
        if outcome != expected and not (rank == run.struck and run.world.lossy):
            raise Violation(f"rank {rank} ends with {outcome}; expected {expected}")


class _Waits:
    """Lets a thread wait for an end of the network. Stands for a loop of it."""

    def __init__(self, run: Run, end: End) -> None:
        self._run = run
        self._process = end.process
        self.end = end
        self.end.loop = self  # type: ignore[assignment]
        self._woken = False

    def wake(self) -> None:
        """Let the thread look."""
        self._woken = self._process.changed = True
        self._process.world.after(STEP_S, self._process.ask_all)

    def taken(self, timeout_s: float) -> list[tuple[str, list[bytearray]]]:
        """Wait for messages; return what has come."""
        self._run.primitives.wait(lambda: self.end.inbox or self._woken, timeout_s)
        self._woken = False
        return self.end.take(256)

    def send(self, far: str, frames: Frames) -> bool:
        """Send; return whether the frames were taken."""
        return self._run.fabric.link(self.end.name, far).send([bytes(each) for each in frames])

    def close(self) -> None:
        """See the transports."""
        self._run.fabric.close(self.end)


class _Server(_Waits):
    """See `ZmqServerTransport`."""

    refused = 0
    address = "tcp://rank 0"

    def __init__(self, run: Run) -> None:
        super().__init__(run, run.listening)

    def admit_no_more(self) -> None:
        """See `ServerTransport`."""

    def known(self, peer: bytes) -> None:
        """See `ServerTransport`."""

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        """See `ServerTransport`."""
        return [(name.encode(), frames) for name, frames in self.taken(timeout_s)]

    def send(self, far: bytes, frames: Frames) -> bool:  # type: ignore[override]
        """See `ServerTransport`."""
        return super().send(far.decode(), frames)


class _Client(_Waits):
    """See `ZmqClientTransport`."""

    def __init__(self, run: Run) -> None:
        process = run.primitives.current
        super().__init__(run, run.fabric.end(process, process.name, relayed=True))
        run.fabric.connect(self.end.name, "rank 0")

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        """See `ClientTransport`."""
        batch = [(0, frames) for _, frames in self.taken(timeout_s)]
        if not batch and self.end.lost:
            raise PeerLost("rank 0 is lost")
        return batch

    def send(self, far: int, frames: Frames) -> bool:  # type: ignore[override]
        """See `ClientTransport`."""
        return super().send("rank 0", frames)


def _for_each(work: Callable[[Any], object], hosts: Sequence[Any], **_: object) -> list[object]:
    return [work(host) for host in hosts]


@contextlib.contextmanager
def _installed(run: Run) -> Iterator[None]:
    """Let the code of rank 0 and of the tasks live in the run's world."""
    primitives = run.primitives

    class Known(Agent):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            run.agents[primitives.current] = self

        def serve(self) -> Any:
            try:
                return super().serve()
            finally:
                shutil.rmtree(self._scratch, ignore_errors=True)

    def no_handlers(agent: Agent) -> AbstractContextManager[list[int]]:
        return nullcontext([])

    of_agents = (agent_host, connection, remote, remote_process, questions, monitor)
    with contextlib.ExitStack() as stack:
        for module in (tasks, channel, dialer, *of_agents):
            for name in ("threading", "queue", "time"):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, getattr(primitives, name)))
        for name, stands_in in (
            ("Agent", Known),
            ("_signals_to", no_handlers),
            ("for_each_host", _for_each),
            ("ZmqServerTransport", lambda address, keys: _Server(run)),
            ("ZmqClientTransport", lambda addresses, keys: _Client(run)),
        ):
            stack.enter_context(patch.object(tasks, name, stands_in))
        clock = SimpleNamespace(time=lambda: 0.0)  # other digits would take another time
        stack.enter_context(patch.object(probe, "time", clock))
        stack.callback(_close, run.world.threads)
        yield


def _close(threads: Sequence[Any]) -> None:
    for thread in threads:
        assert isinstance(thread, BatonThread)
        thread.close()
