"""A worker and a shard of an elastic job.

A worker's code is the real one, from the first line of its standard input to its exit code: the
connection to the launcher, `SolverWork` with its nets, memory snapshots and snapshots on disk, the
exchange and the client. Its threads hand a baton around (`threads.py`), and the thread that moves
messages is a loop of the process. Simulated are its sockets, clocks and disk.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

from torch import Tensor

from poseidon.caffe.proto.definition import SolverDefinition
from poseidon.caffe.solver import checkpoint, display, trainer, worker
from poseidon.caffe.solver.replica import Replica, WorkerNets
from poseidon.caffe.solver.worker import SolverWork
from poseidon.engine import (
    heartbeat,
    launcher_connection,
    launcher_requests,
    memory,
    observation,
    work,
)
from poseidon.engine import snapshot_files as snapshot_writer
from poseidon.engine.document import JobDocument, read_document
from poseidon.engine.heartbeat import Watchdog
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.engine.own_time import OwnTime
from poseidon.engine.process import run_work
from poseidon.errors import PoseidonError
from poseidon.exchange.exchange import Built
from poseidon.exchange.membership import Membership
from ps_server.errors import ServerError
from ps_server.server import Server
from tests.simulation.client import Waits, serve_shard
from tests.simulation.exchanges import WorkerWire, stand_ins
from tests.simulation.hosts import JobProcess
from tests.simulation.launcher import Primitives
from tests.simulation.network import Fabric
from tests.simulation.processes import Process, Question
from tests.simulation.world import World

WAIT_S = 600.0
ORPHAN_S = 20.0
"""How long a shard stays once its launcher has gone."""
STATISTICS_S = 12.0
"""How often a worker reports them: simulated with fewer events."""


class Course(Protocol):
    """What the workers of a run have in common: its course, only for checks, and its disk."""

    world: World
    fabric: Fabric
    primitives: Primitives
    workers: dict[JobProcess, ElasticWorker]
    broken: Exception | None

    def read_solver(self, path: object) -> SolverDefinition:
        """Read the job's definition."""

    def pid(self, process: JobProcess) -> int:
        """Return a number of a process."""

    def check(self, name: str, iteration: int, values: bytes) -> None:
        """Check the values that a process has after an iteration."""

    def iteration_s(self, process: JobProcess, draw: float) -> float:
        """Return the seconds that an iteration of a virtual worker takes in a process.

        Args:
            process: that computes it.
            draw: from 0 to 1.
        """

    def holds(self, process: JobProcess, iteration: int) -> None:
        """Note that a process holds a complete memory snapshot."""

    def ended(self, rank: int, iteration: int, values: bytes) -> None:
        """Note the end of a worker."""

    def write(self, process: JobProcess, path: Path) -> None:
        """Take the time that the disk takes for a file.

        Raises:
            OSError: the disk is full.
        """


class ElasticWorker:
    """The process of a worker.

    Args:
        course: of the run.
        process: the process.
        first_line: of its standard input.
    """

    def __init__(self, course: Course, process: JobProcess, first_line: bytes) -> None:
        self._course = course
        self._process = process
        self._first_line = first_line
        self._random = course.world.stream(f"work of {process.name}")
        self._work: SolverWork | None = None
        self._replica: Replica | None = None
        self.reached = 0
        """The last iteration that it has reported."""
        self._noted: object = None
        self.wires: list[WorkerWire] = []
        """Of the connections to other workers, one for each start."""
        course.workers[process] = self
        process.on_hang_up = self._hang_up
        course.primitives.thread_in(process, self._run).start()

    def _hang_up(self) -> None:
        self._process.ask_all()
        self._course.world.after(launcher_connection.ORPHAN_S, self._process.exit, 1)

    def _run(self) -> None:
        primitives, process = self._course.primitives, self._process
        primitives.time.sleep(1.0 + self._random.random())  # its imports
        inlet: Any = _Inlet(process, primitives)
        outlet: Any = _Outlet(self)
        launcher = LauncherConnection(inlet, outlet, notes=SolverWork.notes)
        launcher.heartbeat = _Heartbeat(launcher.send, Watchdog(now=self._course.world.clock))
        document = read_document(JobDocument, self._first_line)
        self._work = _Work(self, document, launcher)
        status = run_work(self._work)
        if status == 0 and not process.hung_up:
            self._course.ended(self._work.document.rank, self.reached, self._values())
        primitives.time.sleep(0.1)
        process.exit(status)

    def _values(self) -> bytes:
        if self._replica is None:  # it had nothing to do
            return b""
        return b"".join(t.tensor.detach().numpy().tobytes() for t in self._replica.trained)

    def takes(self, replica: Replica) -> None:
        """Compute with these nets."""
        self._replica = replica
        real = replica.forward_backward

        def forward_backward(
            nets: WorkerNets,
            iteration: int,
            after_pass: Callable[[], None],
            on_loss: Callable[[Tensor], None],
        ) -> tuple[Tensor, dict[str, Tensor]]:
            return real(nets, iteration, after_pass, self._computes(iteration, on_loss))

        replica.forward_backward = forward_backward  # type: ignore[method-assign]

    def _computes(
        self, iteration: int, on_loss: Callable[[Tensor], None]
    ) -> Callable[[Tensor], None]:
        """Take the time of an iteration of a virtual worker; return what to do with its loss."""
        seconds = self._course.iteration_s(self._process, self._random.random())
        self._course.primitives.time.sleep(seconds)

        def check(loss: Tensor) -> None:
            self._course.check(self._process.name, iteration, self._values())
            self.note()
            on_loss(loss)

        return check

    def note(self) -> None:
        """Check the newest memory snapshot."""
        kept = None if self._work is None else self._work._memory
        newest = None if kept is None else kept.newest
        if newest is None or not newest.content.is_whole or newest is self._noted:
            return
        self._noted = newest
        values = b"".join(v.numpy().tobytes() for v in newest.content.shared["values"])
        self._course.check(f"the memory of {self._process.name}", newest.iteration, values)
        self._course.holds(self._process, newest.iteration)


class _Heartbeat(heartbeat.HeartbeatSender):
    """The real one, on a host that is idle."""

    def of_host(self) -> dict[str, object]:
        """See `HeartbeatSender`."""
        return {"sending_s": 0.0, "host_busy": 0.0}


class _Work(SolverWork):
    """The real one; an error that it should not raise breaks a law."""

    def __init__(self, worker: ElasticWorker, document: JobDocument, launcher: LauncherConnection):
        super().__init__(document, launcher)
        self._worker = worker

    def membership(self) -> Membership:
        """See `TrainingWork`."""
        member, worker = super().membership(), self._worker
        name = f"{worker._process.name} {len(worker.wires)}"
        worker.wires.append(WorkerWire(worker._course.fabric, worker._process, name))
        return replace(member, network=replace(member.network, wire=worker.wires[-1]))

    def definition(self) -> SolverDefinition:
        """See `SolverWork`."""
        return self._worker._course.read_solver(self.document.definitions)

    def replica(self) -> Replica:
        """See `SolverWork`."""
        found = super().replica()
        self._worker.takes(found)
        return found

    def own_time(self) -> OwnTime:
        """See `TrainingWork`."""
        launcher, clock = self.launcher, self._worker._course.world.clock
        waited_s: Callable[[], float] = lambda: launcher.heartbeat.watchdog.read().waited_s  # noqa: E731
        return OwnTime(launcher.send, waited_s, self.device, now_s=clock)

    def report_plan(self, built: Built, number: int = 0) -> None:
        """Do nothing: see `TrainingWork`."""

    def location(self, error: Exception) -> str:
        """See `Work`; called with the error that has ended it."""
        if not isinstance(error, PoseidonError | ServerError):
            course = self._worker._course
            course.broken = course.broken or error
        return super().location(error)


class _Inlet:
    """The commands of the launcher, line by line."""

    def __init__(self, process: JobProcess, primitives: Primitives) -> None:
        self._process = process
        self._primitives = primitives

    def __iter__(self) -> Iterator[str]:
        process, commands = self._process, self._process.commands
        while self._primitives.wait(lambda: commands or process.hung_up, None) and commands:
            yield json.dumps(commands.pop(0))


class _Outlet:
    """Takes events."""

    def __init__(self, worker: ElasticWorker) -> None:
        self._worker = worker

    def write(self, text: str) -> None:
        """See `TextIO`."""
        event = json.loads(text)
        if event["event"] == "progress":
            self._worker.reached = event["iteration"]
        self._worker.note()
        self._worker._process.emit(event)

    def flush(self) -> None:
        """See `TextIO`."""


@contextlib.contextmanager
def installed(course: Course) -> Iterator[None]:
    """Let the code of the workers live in the run's world."""
    primitives, world = course.primitives, course.world

    def running() -> ElasticWorker:
        assert world.running is not None
        process = world.running.process
        assert isinstance(process, JobProcess)
        return course.workers[process]

    def wire_of(process: Process) -> WorkerWire:
        assert isinstance(process, JobProcess)
        return course.workers[process].wires[-1]

    def write_whole(path: Path, content: bytes) -> None:
        course.write(running()._process, path)
        path.write_bytes(content)

    places: Sequence[tuple[Any, str, object]] = (
        *stand_ins(primitives, wire_of),
        (launcher_connection, "threading", primitives.threading),
        (heartbeat, "threading", primitives.threading),
        (launcher_connection, "queue", primitives.queue),
        (launcher_requests, "threading", primitives.threading),
        (launcher_requests, "queue", primitives.queue),
        (launcher_connection, "time", primitives.time),
        (observation, "threading", primitives.threading),
        (observation, "STATISTICS_S", STATISTICS_S),
        (snapshot_writer, "threading", primitives.threading),
        (worker, "gc", SimpleNamespace(collect=int, freeze=int, unfreeze=int)),
        *(
            (module, "time", primitives.time)
            for module in (work, worker, trainer, display, memory, checkpoint)
        ),
        (snapshot_writer, "write_whole", write_whole),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, stands_in in places:
            stack.enter_context(patch.object(owner, name, stands_in))
        yield


class ElasticShard:
    """The process of a shard: it serves a start, pauses, and goes on with another one.

    Args:
        course: of the run.
        process: the process.
        document: of its first start.
    """

    def __init__(self, course: Course, process: JobProcess, document: Mapping[str, Any]) -> None:
        self._course = course
        self._process = process
        self._server: Server | None = None
        self._over = True
        self._starts = 0
        process.on_command = self._obey
        process.on_hang_up = lambda: course.world.after(ORPHAN_S, process.exit, 0)
        process.task(self._begin(document))
        process.beat()

    def _begin(self, document: Mapping[str, Any]) -> Waits:
        yield 0.5
        self._listen(document)
        self._obey()

    def _listen(self, document: Mapping[str, Any]) -> None:
        process, name = self._process, f"{self._process.name} {self._starts}"
        self._starts += 1
        self._over = False
        self._server = serve_shard(
            self._course.fabric,
            process,
            document["shard"],
            document["workers"],
            name=name,
            token=document["token"].encode(),
            ended=self._ended,
        )
        process.emit({"event": "listening", "address": name, "round": 0})

    def _ended(self) -> None:
        self._over = True

    def _obey(self) -> None:
        if self._server is None:
            return
        for command in self._process.commands:
            if command["do"] == "stop":
                self._process.exit(0)
            elif command["do"] == "go_on":
                document: Any = command["document"]
                self._listen(document)
            elif command["do"] == "pause":
                self._server.drop()
                self._process.task(self._pause())
        self._process.commands.clear()

    def _pause(self) -> Waits:
        yield Question(lambda: True if self._over else None, "the end of its server", WAIT_S)
        self._process.emit({"event": "paused", "snapshot": None})
