"""Simulated hosts: an agent each, and the processes of a job.

What an agent does is decided by the real `AgentState`, and travels in the real format.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from poseidon.cluster.agent.agent import Action as AgentAction
from poseidon.cluster.agent.agent import AgentState, EndProcesses
from poseidon.cluster.agent.messages import (
    REPORTS,
    REQUESTS,
    AgentHello,
    AgentWelcome,
    Answer,
    EndAll,
    EventReport,
    Exited,
    Heartbeat,
    ProcessSignal,
    Report,
    Request,
    SendSignal,
    Started,
    StartProcess,
    WriteLine,
)
from poseidon.cluster.process import ProcessSpec
from poseidon.version import __version__
from tests.simulation.launcher import SimulatedChannel
from tests.simulation.network import Fabric
from tests.simulation.processes import Process
from tests.simulation.world import World

TICK_S = 1.0
HEARTBEAT_S = 2.0
BEAT_S = 0.7
"""The wait between heartbeats of a process, which lasts up to three times as long (`LATE`)."""


class JobProcess(Process):
    """A worker or a shard.

    Args:
        world: it runs in.
        name: of the process.
        report: takes its events.
        exited: takes its exit status.
    """

    def __init__(
        self,
        world: World,
        name: str,
        report: Callable[[Mapping[str, object]], None],
        exited: Callable[[int], None],
    ) -> None:
        super().__init__(world, name)
        self.commands: list[Mapping[str, object]] = []
        self.hangs = False
        """Whether it does nothing any more, though its threads live."""
        self.hung_up = False
        """Whether its standard input has ended."""
        self.on_hang_up: Callable[[], None] = lambda: self.exit(1)
        self.on_command: Callable[[], None] = self.ask_all
        self.emit = report
        self._exited = exited

    def line(self, line: bytes) -> None:
        """Take a line of standard input."""
        if self.alive:
            self.commands.append(json.loads(line))
            self.changed = True
            self.on_command()

    def hang_up(self) -> None:
        """End its standard input: its agent is dead."""
        if self.alive:
            self.hung_up = self.changed = True
            self.on_hang_up()

    def exit(self, status: int) -> None:
        """End, by itself or by a signal (negative)."""
        if self.alive:
            self.kill()
            self._exited(status)

    def beat(self) -> None:
        """Send heartbeats from now on."""
        self.loop(self._beats(), _raise, lambda: None)

    def _beats(self) -> Iterator[float]:
        while True:
            yield BEAT_S
            self.emit({"event": "alive", "still_s": 0.0})


class SimulatedHost:
    """A host.

    Args:
        fabric: the network.
        name: of the host.
        spawn: makes a process of the job do its work.
    """

    def __init__(
        self, fabric: Fabric, name: str, spawn: Callable[[JobProcess, ProcessSpec], None]
    ) -> None:
        self.fabric = fabric
        self.name = name
        self.up = True
        self.scratch = "/s"
        self.agents: list[HostAgent] = []
        self.spawn = spawn

    @property
    def processes(self) -> list[JobProcess]:
        """The processes of the job that run here."""
        return [p for agent in self.agents for p in agent.processes.values() if p.alive]

    @property
    def everything(self) -> list[Process]:
        """The agents here, and their processes, with those that have ended."""
        return [p for agent in self.agents for p in (agent.process, *agent.processes.values())]

    def crash(self) -> None:
        """End everything here at once; nobody is told."""
        self.up = False
        for agent in self.agents:
            for process in (*agent.processes.values(), agent.process):
                process.kill(silent=True)
        self.agents.clear()


class HostAgent:
    """An agent on its host."""

    def __init__(self, host: SimulatedHost, number: int) -> None:
        world = host.fabric.world
        self.process = Process(world, f"agent {host.name} {number}")
        self.processes: dict[int, JobProcess] = {}
        self._host = host
        self._number = number
        self._state = AgentState(__version__, 60.0, world.now)
        self._outbox: deque[Report] = deque()
        self._left_s = math.inf
        """When it has ended its processes."""
        end = host.fabric.end(self.process, self.process.name, relayed=True)
        self._channel = SimulatedChannel(host.fabric, end, f"launcher to {self.process.name}")

    def serve(self) -> None:
        """Begin to serve; the launcher's end exists."""
        self._channel.end.loop = self.process.loop(self._steps(), _raise, lambda: None)

    def _steps(self) -> Iterator[float]:
        world, beat_s = self.process.world, 0.0
        while self._left_s == math.inf:
            if self._channel.ready and (encoded := self._channel.receive()) is not None:
                self._do(self._state.take(REQUESTS.decode(encoded), world.now))
            elif self._channel.ready:
                self._do(self._state.end_of_channel())
            else:
                self._do(self._state.tick(world.now))
            if world.now - beat_s >= HEARTBEAT_S and self._state.greeted:
                beat_s = world.now
                self._outbox.append(Heartbeat())
            self._flush()
            if not self._channel.ready:
                yield TICK_S
        while self._outbox and self._channel.open and world.now < self._left_s + HEARTBEAT_S:
            yield TICK_S
            self._flush()
        self._channel.close()

    def kill_as_user(self) -> None:
        """End, since the user has killed the job here."""
        self._take_signal(self._state.killed_by_user)

    def ask_to_end(self) -> None:
        """Take SIGTERM."""
        self._take_signal(lambda: self._state.signaled("SIGTERM"))

    def _take_signal(self, handler: Callable[[], list[AgentAction]]) -> None:
        if self.process.stopped_s:
            self.process.world.after(self.process.stopped_s, self._take_signal, handler)
        elif self.process.alive:
            self._do(handler())
            self._channel.end.wake()

    def kill(self) -> None:
        """End at once (SIGKILL); the processes lose their standard input."""
        self.process.kill()
        for process in self.processes.values():
            process.hang_up()

    def report(self, report: Report) -> None:
        """Send a report."""
        if self.process.alive and self._left_s == math.inf:
            self._outbox.append(report)
            self._channel.end.wake()

    def _flush(self) -> None:
        while self._outbox and self._channel.open and not self._channel.full:
            self._channel.send(REPORTS.encode(self._outbox.popleft()))

    def _do(self, actions: list[AgentAction]) -> None:
        for action in actions:
            if isinstance(action, EndProcesses):
                self._leave(action)
            elif isinstance(action, Request):
                self._perform(action)
            else:
                self._outbox.append(action)

    def _perform(self, request: Request) -> None:
        if isinstance(request, AgentHello):
            scratch = self._host.scratch
            self._outbox.append(AgentWelcome(cores=1, scratch=scratch))
        elif isinstance(request, StartProcess):
            self._start(request)
        elif isinstance(request, WriteLine) and request.id in self.processes:
            self.processes[request.id].line(request.line)
        elif isinstance(request, SendSignal) and request.id in self.processes:
            process, kill = self.processes[request.id], request.signal is ProcessSignal.KILL
            if kill or not process.hangs:
                process.exit(-9 if kill else -15)
        elif isinstance(request, EndAll):
            self._end_processes()
            self._outbox.append(Answer(id=request.id, answer={}))

    def _start(self, request: StartProcess) -> None:
        def event(fields: Mapping[str, object]) -> None:
            self.report(EventReport(id=request.id, event=fields))

        def exited(status: int) -> None:
            self.report(Exited(id=request.id, status=status))

        name = f"{request.spec.name.short} ({self._number}.{request.id})"
        process = JobProcess(self.process.world, name, event, exited)
        self.processes[request.id] = process
        self._outbox.append(Started(id=request.id, pid=100 + request.id, created="0.0"))
        self._host.spawn(process, request.spec)

    def _leave(self, leave: EndProcesses) -> None:
        self._end_processes()
        self._left_s = self.process.world.now
        self._flush()

    def _end_processes(self) -> None:
        for process in self.processes.values():
            process.exit(-9)
        self.processes.clear()


def _raise(error: Exception) -> None:
    raise error
