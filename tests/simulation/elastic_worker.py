"""A worker of an elastic job: it trains, keeps memory snapshots, pauses and goes on.

Real are its memory snapshots, its connection to the launcher, the interruption of its waits, and
its client. Its nets are a number for each virtual worker, which depends on all iterations so far
and which every gradient depends on, as on random states and positions of readers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch

from poseidon.engine.launcher_connection import JOB, LauncherConnection
from poseidon.engine.solver.checkpoint import Progress
from poseidon.engine.solver.memory import MemorySnapshot, MemorySnapshots, SnapshotInterval
from poseidon.engine.solver.trainer import Regrouped
from poseidon.engine.solver.worker_state import restore
from poseidon.errors import JobError
from poseidon.exchange.base import History
from poseidon.exchange.job_control import join, split
from ps_server import Collection
from ps_server.errors import PeerLost, ServerError, StalenessTimeout
from ps_server.protocol import messages as m
from ps_server.protocol.asked_history import AskedHistory
from ps_server.protocol.settings import Rule, StoreSpec, TableSpec
from ps_server.protocol.virtual_workers import VirtualWorkers
from ps_server.server import Server
from tests.simulation.client import SimulatedWorker, Waits, serve_shard
from tests.simulation.hosts import JobProcess
from tests.simulation.network import Fabric
from tests.simulation.processes import Question
from tests.simulation.world import Violation, World

START_S = 180.0
WAIT_S = 600.0
SIZE = 6
RATE = 0.1
_STATE = struct.Struct("<I")


class Course(Protocol):
    """What the workers of a run have in common: its course, only for checks, and its disk."""

    world: World
    fabric: Fabric
    iterations: int
    every: int

    def check(self, name: str, iteration: int, values: bytes) -> None:
        """Check the values that a process has after an iteration."""

    def holds(self, process: JobProcess, iteration: int) -> None:
        """Note that a process holds a complete memory snapshot."""

    def read(self, state: str) -> bytes:
        """Return a snapshot on the disk."""

    def write(self, process: JobProcess, iteration: int, content: bytes) -> Waits:
        """Write one."""

    def ended(self, rank: int, iteration: int, values: bytes) -> None:
        """Note the end of a worker."""


class _Connection(LauncherConnection):
    """The real one; what its threads do, events do here."""

    def __init__(self, process: JobProcess) -> None:
        super().__init__(SimpleNamespace(), self, notes={})  # type: ignore[arg-type]
        self._process = process

    def write(self, text: str) -> None:
        """Take an event; this is the stream that it is written to."""
        self._process.emit(json.loads(text))

    def flush(self) -> None:
        """Do nothing: what was written has left."""

    def obey(self) -> None:
        """Take the commands that have come."""
        for command in self._process.commands:
            self._take(dict(command))
        self._process.commands.clear()
        while self._forwards and not self.commands.empty():
            self._forward_one(str(self.commands.get_nowait().get("do")))

    def addresses(self, own: str) -> Waits:
        """See `exchange_addresses`."""
        number = self._rounds[JOB]
        self._rounds[JOB] += 1
        if own:
            self.send("listening", address=own, round=number, among=JOB)

        def ask() -> list[str] | None:
            if (JOB, number) in self._addresses:
                return self._addresses[JOB, number]
            self.interruption.check()
            return None

        return (yield Question(ask, "the addresses of the job", WAIT_S))

    def document(self) -> Waits:
        """Wait for the document of the next start."""

        def ask() -> Mapping[str, Any] | None:
            return None if self._documents.empty() else self._documents.get_nowait()

        return (yield Question(ask, "the document of the next start", 1e6))

    def _thread(self, name: str, work: Callable[[], None]) -> Any:
        return SimpleNamespace(start=lambda: None)


class _Net:
    """The net of a virtual worker; see `WorkerNets`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.train, self.tests = self, ()
        self.layer_modules = ()
        self.state = number + 1

    def advance(self, iteration: int) -> None:
        """Compute an iteration."""
        self.state = (1103515245 * self.state + 12345 * iteration + self.number) % 2**31

    def random_state(self) -> bytes:
        """See `Net`."""
        return _STATE.pack(self.state)

    def set_random_state(self, packed: bytes) -> None:
        """See `Net`."""
        (self.state,) = _STATE.unpack(packed)

    def readers(self) -> Iterator[tuple[str, object]]:
        """See `Net`: it has none."""
        return iter(())


class _Frozen:
    """A history of a blob that does not learn; see `FrozenHistories`."""

    def __init__(self) -> None:
        self.count = 0.0

    def arrays(self) -> dict[str, History]:
        """See `FrozenHistories`."""
        return {"frozen": [np.array([self.count], np.float32)]}

    def restore(self, histories: Mapping[str, History]) -> None:
        """See `FrozenHistories`."""
        self.count = float(histories["frozen"][0][0])


class _Kept:
    """See `KeptState`."""

    held_back: Mapping[str, m.Array] = {}

    def __init__(self, client: SimulatedWorker, asked: AskedHistory) -> None:
        self._client = client
        self._asked = asked

    def poll(self) -> list[History] | None:
        """See `KeptState`."""
        self._client.monitor.check()
        return None if self._asked.arrays is None else [list(self._asked.arrays)]

    def result(self) -> list[History]:
        """See `KeptState`; all is here."""
        found = self.poll()
        assert found is not None
        return found


class _Exchange:
    """What memory snapshots and requests need of an exchange."""

    def __init__(self, client: SimulatedWorker) -> None:
        self.client = client
        self.control = self.state = self

    @property
    def closed(self) -> bool:
        """See `Exchange`."""
        return self.client.monitor.closed

    def settle(self) -> None:
        """See `Exchange`: all has been read."""

    def gather(self, payload: bytes, _: Container[int] | None = None) -> Collection:
        """See `JobControl`."""
        client = self.client
        client.monitor.check()
        tag, outgoing = client.session.gather(payload)
        client.do(outgoing)
        return Collection.guarded(client.monitor, lambda: client.session.collections.take(tag))

    def request(self, kind: m.SignalKind) -> None:
        """See `JobControl`."""
        self.client.monitor.check()
        self.client.signal(kind)

    def keep(self, into: Sequence[History]) -> _Kept:
        """See `ExchangeState`."""
        self.client.monitor.check()
        asked, outgoing = self.client.session.ask_history(0, into[0] if into else None)
        self.client.do(outgoing)
        return _Kept(self.client, asked)

    def parts(self) -> Mapping[str, torch.Tensor]:
        """See `ExchangeState`."""
        return {}


class ElasticWorker:
    """The process of a worker.

    Args:
        course: of the run.
        process: the process.
        document: of its first start.
    """

    def __init__(self, course: Course, process: JobProcess, document: Mapping[str, Any]) -> None:
        self._course = course
        self._process = process
        self._document = document
        self._connection = _Connection(process)
        self._random = course.world.stream(f"work of {process.name}")
        self._value = torch.zeros(SIZE)
        self._frozen = _Frozen()
        self._nets: list[_Net] = []
        self._memory: MemorySnapshots | None = None
        self._starts = self._writing = 0
        process.on_command = self._obey
        process.task(self._run())

    def _obey(self) -> None:
        self._connection.obey()
        self._process.ask_all()

    def _run(self) -> Waits:
        yield 1.0 + self._random.random()
        try:
            while not (yield from self._trained()):
                self._starts += 1
                yield 0.05 * self._random.random()
            yield Question(lambda: None if self._writing else True, "its snapshots", WAIT_S)
        except (ServerError, JobError) as error:
            lost = isinstance(error, PeerLost)
            yield from self._end("error", message=str(error), exit_code=1, peer_lost=lost)
        except Exception as error:  # noqa: BLE001 - of the simulation, or a law that does not hold
            self._course.world.after(0.0, _raise, error)
        else:
            yield from self._end("done")

    def _end(self, event: str, **fields: object) -> Waits:
        self._connection.send(event, **fields)
        yield 0.1
        self._process.exit(int(event == "error"))

    def _trained(self) -> Waits:
        """See `SolverWork`."""
        if self._document["aside"]:
            yield from self._pause(None)
            return False
        try:
            yield from self._start()
        except Regrouped:
            yield from self._pause(self._kept_iteration, regrouped=True)
        except ServerError as error:
            asked = self._connection.is_asked_to_pause
            lost = isinstance(error, PeerLost | StalenessTimeout)
            if not (self._document["replicas"] and (lost or asked)):
                raise
            yield from self._pause(self._kept_iteration, "" if asked else str(error))
        else:
            return True
        return False

    def _pause(self, snapshot: int | None, message: str = "", *, regrouped: bool = False) -> Waits:
        connection = self._connection
        connection.send("paused", snapshot=snapshot, message=message, regrouped=regrouped)
        self._document = yield from connection.document()

    @property
    def _newest(self) -> MemorySnapshot | None:
        return None if self._memory is None else self._memory.newest

    @property
    def _kept_iteration(self) -> int | None:
        newest = self._newest
        return newest.iteration if newest is not None and newest.values else None

    def _start(self) -> Waits:
        document, connection = self._document, self._connection
        rank, name = document["rank"], f"{self._process.name} {self._starts}"
        placed = VirtualWorkers(tuple(document["virtual_workers"]))
        self._nets = [_Net(number) for number in placed.of(rank)]
        own = self._serve(name) if rank == 0 and not document["shards"] else ""
        first = self._first()
        connection.send("ready")
        shards = yield from connection.addresses(own)
        client = SimulatedWorker(
            self._course.fabric,
            self._process,
            rank,
            store_of(placed, len(shards), max(0, document["rewind"], document["begin"])),
            shards,
            name=name,
            token=bytes.fromhex(document["token"]),
        )
        client.timeout_s = WAIT_S
        connection.interruption.on_interrupt(client.monitor.interrupt)
        connection.interruption.on_interrupt(lambda _: self._process.ask_all())
        failure: Exception | None = None
        try:
            yield from client.start(lambda table: first)
            yield from self._train(client, placed)
        except ServerError as error:
            connection.interruption.interrupt(error)
            failure = error
        except Regrouped as end:
            failure = end
        yield from client.close()
        if failure is not None:
            raise failure

    def _serve(self, name: str) -> str:
        """Listen in place of shards, on the one host that is left."""
        document, address = self._document, f"{name} serves"
        workers, token = document["workers"], bytes.fromhex(document["token"])
        serve_shard(self._course.fabric, self._process, 0, workers, name=address, token=token)
        return address

    def _first(self) -> Sequence[m.Array]:
        """Return values and history at the start; every worker sets its states, if it has them."""
        document = self._document
        if document["rewind"] >= 0:
            newest = self._newest
            if document["rank"]:
                return ()
            if newest is None or newest.iteration != document["rewind"] or not newest.values:
                raise JobError(f"worker 0 has no memory snapshot of {document['rewind']}")
            return [newest.values[0].numpy().copy(), *newest.histories[0]]
        if not document["snapshot"]:
            self._frozen.count = 0.0
            return [np.linspace(-1, 1, SIZE, dtype=np.float32), np.zeros(SIZE, np.float32)]
        value, history, count, *states = split(self._course.read(document["snapshot"]))
        for net in self._nets:
            net.set_random_state(states[net.number])
        self._frozen.count = float(count)
        return [np.frombuffer(part, np.float32).copy() for part in (value, history)]

    def _train(self, client: SimulatedWorker, placed: VirtualWorkers) -> Waits:
        document, exchange = self._document, _Exchange(client)
        start = Progress(iteration=document["begin"])
        if document["rewind"] >= 0:
            start = yield from self._share(client, placed)
        self._connection.forward_requests(exchange, document["rank"])  # type: ignore[arg-type]
        self._connection.obey()
        self._memory = MemorySnapshots(
            SimpleNamespace(  # type: ignore[arg-type]
                nets=self._nets,
                trained=[SimpleNamespace(tensor=self._value)],
                context=SimpleNamespace(rank=document["rank"]),
            ),
            exchange,  # type: ignore[arg-type]
            self._frozen,  # type: ignore[arg-type]
            holds=document["client"] <= document["replicas"] and document["local_rank"] == 0,
            interval=SnapshotInterval(start.iteration, document["memory_snapshot_every"]),
            newest=self._newest,
        )
        yield from self._loop(client, start.iteration, self._memory)

    def _share(self, client: SimulatedWorker, placed: VirtualWorkers) -> Waits:
        """See `SolverWork`."""
        newest = self._newest
        own = newest.pack() if self._document["rank"] == 0 and newest is not None else b""
        packed = (yield from client.gather(own))[0]
        snapshot = MemorySnapshot.unpack(packed)
        for net in self._nets:
            restore(net, snapshot.states[net.number])  # type: ignore[arg-type]
        self._frozen.restore(snapshot.frozen)
        return snapshot.progress(placed.of(self._document["rank"]))

    def _loop(self, client: SimulatedWorker, iteration: int, memory: MemorySnapshots) -> Waits:
        """See `Trainer`."""
        course = self._course
        yield from self._read(client, iteration)
        if iteration < course.iterations:
            yield from self._keep(client, memory, iteration)
        while iteration < course.iterations:
            began_s = course.world.now
            yield from self._iterate(client, iteration)
            iteration += 1
            yield from self._came(client, memory, whole=False)
            memory.follow(course.world.now - began_s)
            self._note(memory)
            self._connection.send("progress", iteration=iteration)
            yield from self._read(client, iteration)
            kinds = {s.kind for s in client.session.signals.all if s.clock == iteration}
            if m.SignalKind.STOP in kinds or iteration % course.every == 0:
                yield from self._save(client, iteration)
            if m.SignalKind.STOP in kinds:
                return
            regroups = m.SignalKind.REGROUP in kinds and iteration < course.iterations
            if regroups or (iteration < course.iterations and memory.is_due(iteration)):
                yield from self._keep(client, memory, iteration)
            if regroups:
                yield from self._came(client, memory, whole=True)
                memory.finish()
                self._note(memory)
                raise Regrouped
        values = self._value.numpy().tobytes()
        course.ended(self._document["rank"], iteration, values)
        yield from client.gather(b"")

    def _read(self, client: SimulatedWorker, iteration: int) -> Waits:
        value = self._value.numpy()
        yield from client.read(0, value)
        self._course.check(self._process.name, iteration, value.tobytes())

    def _iterate(self, client: SimulatedWorker, iteration: int) -> Waits:
        yield 0.6 + 0.6 * self._random.random()
        value = self._value.numpy()
        for net in self._nets:
            net.advance(iteration)
            self._frozen.count += net.number == 0
            if net.number == 0 and self._frozen.count != iteration + 1:
                raise Violation(f"a history of {self._frozen.count} changes in {iteration + 1}")
        states = {net.number: net.state for net in self._nets}

        def gradient(number: int) -> m.Array:
            draws = np.sin(np.arange(SIZE, dtype=np.float32) + np.float32(states[number] % 1000))
            return value * np.float32(0.1 * (number + 1)) + draws

        client.push_sums(0, gradient, RATE)
        client.tick()

    def _keep(self, client: SimulatedWorker, memory: MemorySnapshots, iteration: int) -> Waits:
        yield from self._came(client, memory, whole=True)
        memory.begin(iteration, 0, {net.number: [float(net.state)] for net in self._nets})

    def _came(self, client: SimulatedWorker, memory: MemorySnapshots, *, whole: bool) -> Waits:
        """Wait for what the next call needs of a snapshot that has begun."""
        begun = memory._begun
        if begun is None:
            return

        def here() -> bool | None:
            kept = begun.kept.poll() if whole and begun.kept is not None else ()
            return None if begun.states.poll() is None or kept is None else True

        yield from client.wait_for(here, "a memory snapshot")

    def _note(self, memory: MemorySnapshots) -> None:
        """Check the newest memory snapshot."""
        iteration = self._kept_iteration
        if iteration is not None:
            assert memory.newest is not None
            value = memory.newest.values[0].numpy()
            self._course.check(f"the memory of {self._process.name}", iteration, value.tobytes())
            self._course.holds(self._process, iteration)

    def _save(self, client: SimulatedWorker, iteration: int) -> Waits:
        """Write a snapshot to the disk."""
        states = yield from client.gather(join(net.random_state() for net in self._nets))
        if self._document["rank"]:
            return
        asked, sent = client.session.ask_history(0)
        client.do(sent)
        (history,) = yield from client.wait_for(lambda: asked.arrays, "the history")
        parts = [self._value.numpy().tobytes(), history.tobytes(), b"%d" % self._frozen.count]
        content = join([*parts, *(state for part in states for state in split(part))])
        self._writing += 1
        self._process.task(self._write(iteration, content))

    def _write(self, iteration: int, content: bytes) -> Waits:
        yield from self._course.write(self._process, iteration, content)
        self._writing -= 1


def store_of(placed: VirtualWorkers, shards: int, clock: int) -> StoreSpec:
    """Return the store of a start."""
    tables = (TableSpec(name="w", size=SIZE, rows=2, rule=Rule(momentum=0.5)),)
    return StoreSpec(
        workers=placed.processes,
        shards=shards,
        tables=tables,
        start_clock=clock,
        virtual_workers=placed,
    )


def _raise(error: Exception) -> None:
    raise error


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
        process.task(self._begin(document))

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
            token=bytes.fromhex(document["token"]),
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
