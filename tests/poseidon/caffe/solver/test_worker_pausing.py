"""Workers that pause and go on with other workers: the bits of an undisturbed job."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poseidon.caffe.proto.caffe_pb2 import LayerParameter, NetParameter
from poseidon.caffe.snapshot.caffemodel import write_model
from poseidon.caffe.solver.worker import SolverWork
from poseidon.engine.document import JobDocument
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.engine.memory import SolverMemory
from poseidon.engine.process import run_work
from poseidon.exchange.base import History
from poseidon.exchange.carrier import UnitedState
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from ps_server import Server, Shard, ZmqServerTransport
from ps_server.network import Network
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.support.cluster import serving
from tests.support.training import write_definitions

V = 6
ITERATIONS = 40
WAIT_S = 60.0


class Worker:
    """A worker of a job, as a thread; the test is its launcher."""

    def __init__(self, document: JobDocument) -> None:
        ends = [os.pipe() for _ in range(2)]
        (inlet, self._events), (self._commands, outlet) = (
            [os.fdopen(ends[0][0], "r"), os.fdopen(ends[1][0], "r")],
            [os.fdopen(ends[0][1], "w"), os.fdopen(ends[1][1], "w")],
        )
        self._files = [inlet, self._events, self._commands, outlet]
        self._arrived = threading.Condition()
        self.events: list[dict[str, Any]] = []
        work = SolverWork(document, LauncherConnection(inlet, outlet))

        def run() -> None:
            run_work(work)
            outlet.close()

        self._threads = [threading.Thread(target=run), threading.Thread(target=self._read)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        for line in self._events:
            with self._arrived:
                self.events.append(json.loads(line))
                self._arrived.notify_all()

    def send(self, do: str, **fields: object) -> None:
        self._commands.write(json.dumps({"do": do, **fields}) + "\n")
        self._commands.flush()

    def wait_for(self, event: str, **fields: object) -> dict[str, Any]:
        """Wait for an event with these fields; forget those up to it."""
        wanted = {"event": event, **fields}
        with self._arrived:

            def found() -> int | None:
                for number, one in enumerate(self.events):
                    assert one["event"] != "error" or event == "error", one
                    if wanted.items() <= one.items():
                        return number + 1
                return None

            assert self._arrived.wait_for(found, WAIT_S), f"no {wanted} in {self.events}"
            number = found()
            assert number is not None
            event_found = self.events[number - 1]
            del self.events[:number]
            return event_found

    def reach(self, iteration: int) -> None:
        """Wait until the worker has reported an iteration."""
        while self.wait_for("progress")["iteration"] < iteration:
            pass

    def end(self) -> None:
        """Go, as a launcher does; return when the worker has ended."""
        self._commands.close()
        for thread in self._threads:
            thread.join()
        for file in self._files:
            file.close()


@contextmanager
def start(
    first: JobDocument, workers: int, rewind: int = -1, speeds: Sequence[float] = ()
) -> Iterator[tuple[list[JobDocument], list[str]]]:
    """Run the shards of one start; yield the documents of its workers, and the addresses."""
    own = documents(first, workers, rewind, speeds)
    servers = [
        Server(
            Shard(index, workers, own[0].member.network.token),
            ZmqServerTransport("tcp://127.0.0.1:0"),
        )
        for index in range(first.member.shards)
    ]
    with serving(servers):
        yield own, [server.address for server in servers]


def documents(
    first: JobDocument, workers: int, rewind: int = -1, speeds: Sequence[float] = ()
) -> list[JobDocument]:
    """Return the documents of the workers of a start."""
    placed = VirtualWorkers.spread(V, speeds or [1.0] * workers)
    return [
        replace(
            first,
            member=replace(
                first.member,
                network=Network(rank=rank, size=workers, token=b"%d %d" % (workers, rewind)),
                virtual_workers=placed,
            ),
            rewind=rewind,
            weights=first.weights if rewind < 0 else (),
        )
        for rank in range(workers)
    ]


def model(folder: Path) -> str:
    return hashlib.sha256((folder / f"snap_iter_{ITERATIONS}.caffemodel").read_bytes()).hexdigest()


def connect(workers: Sequence[Worker], addresses: Sequence[str]) -> None:
    """Send the addresses of the shards; without shards the workers'."""
    addresses = addresses or [worker.wait_for("listening")["address"] for worker in workers]
    for worker in workers:
        worker.send("connect", addresses=addresses, round=0, among="job")


def finish(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.wait_for("done")
        worker.end()


def go_on(workers: Sequence[Worker], own: Sequence[JobDocument]) -> None:
    for worker, document in zip(workers, own, strict=True):
        worker.send("go_on", document=json.loads(document.to_json()))


def pause_all(first: JobDocument, count: int) -> tuple[list[Worker], list[Any]]:
    """Pause so many workers of a job after some iterations; return them, and the iterations of
    their memory snapshots.
    """
    with start(first, count) as (own, addresses):
        workers = [Worker(document) for document in own]
        connect(workers, addresses)
        workers[0].reach(9)
        for worker in workers:
            worker.send("pause")
        return workers, [worker.wait_for("paused")["snapshot"] for worker in workers]


RECURRENT = """
layer { name: "x" type: "DummyData" top: "x" top: "cont" top: "target"
  dummy_data_param { data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 }
    data_filler { type: "gaussian" } shape { dim: 4 dim: 5 dim: 3 } shape { dim: 4 dim: 5 }
    shape { dim: 4 dim: 5 dim: 2 } } }
layer { name: "lstm" type: "LSTM" bottom: "x" bottom: "cont" top: "lstm"
  recurrent_param { num_output: 2 weight_filler { type: "uniform" min: -0.5 max: 0.5 } } }
layer { name: "distance" type: "EuclideanLoss" bottom: "lstm" bottom: "target" top: "distance" }
"""
FIXED = """
layer { name: "fixed" type: "InnerProduct" bottom: "ip" top: "fixed" param { lr_mult: 0 } param { lr_mult: 0 }
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss1" type: "SoftmaxWithLoss" bottom: "fixed" bottom: "label" top: "loss1" }
"""


@pytest.fixture
def first(tmp_path: Path, databases: Path) -> JobDocument:
    """The document of a job, whose net has dropout, statistics, sequences that go on, and a layer
    that does not learn, whose weights are a file's.
    """
    for name in ("train_lmdb", "test_lmdb"):
        (tmp_path / name).symlink_to(databases / name)
    extra = f"max_iter: {ITERATIONS}\ntest_interval: 8\nsnapshot: 0\ndisplay: 1"
    solver = write_definitions(tmp_path, batch=4, extra=extra, dropout=True, norm=True)
    with (tmp_path / "net.prototxt").open("a", encoding="utf-8") as net:
        net.write(RECURRENT + FIXED)
    values = np.linspace(-1, 1, 100, dtype=np.float32)
    blobs = [values.reshape(10, 10), values[:10]]
    weights = tmp_path / "fixed.caffemodel"
    layers = [LayerParameter(name="fixed", type="InnerProduct")]
    write_model(weights, NetParameter(layer=layers), [("fixed", "InnerProduct", blobs)])
    (tmp_path / "out").mkdir()
    return JobDocument(
        job="job",
        output=str(tmp_path / "out"),
        solver=str(solver),
        weights=(str(weights),),
        member=Membership(shards=2),
        copies=1,
        memory_snapshot_every=4,
        net_outputs=str(tmp_path / "outputs"),
    )


def shown(folder: Path) -> list[str]:
    """Return the rows of the job's net outputs, without their times."""
    rows = (folder / "outputs.netoutputs").read_text(encoding="utf-8").splitlines()
    return [",".join(row.split(",")[:1] + row.split(",")[2:]) for row in rows]


def seconds_after(iteration: int, folder: Path) -> list[float]:
    """Return the times of the train net's rows after an iteration."""
    text = (folder / "outputs.netoutputs").read_text(encoding="utf-8")
    rows = [row.split(",") for row in text.split("\n\n")[0].splitlines()[1:]]
    return [float(row[1]) for row in rows if int(row[0]) > iteration]


def undisturbed(first: JobDocument) -> None:
    """Run a job that loses nothing."""
    with start(first, 2) as (own, addresses):
        workers = [Worker(document) for document in own]
        connect(workers, addresses)
        finish(workers)


EXCHANGES = {
    "hybrid": ExchangeOptions(kind=ExchangeKind.HYBRID),
    "svb": ExchangeOptions(kind=ExchangeKind.FACTORS),
    "allreduce": ExchangeOptions(kind=ExchangeKind.ALLREDUCE),
    "int8": ExchangeOptions(kind=ExchangeKind.SERVER, compress="*=int8"),
    "local steps": ExchangeOptions(kind=ExchangeKind.SERVER, local_steps=3, compress="*=int8"),
    "local steps by allreduce": ExchangeOptions(kind=ExchangeKind.ALLREDUCE, local_steps=3),
    "powersgd": ExchangeOptions(kind=ExchangeKind.SERVER, compress="*=powersgd:1"),
}


THOROUGH = ("allreduce", "int8", "local steps by allreduce", "svb", "powersgd")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if name in THOROUGH else ())
        for name in EXCHANGES
    ],
)
def test_survivors_go_on_from_memory_and_take_in_a_newcomer(
    tmp_path: Path, first: JobDocument, name: str
) -> None:
    """Three workers lose the first; the others regroup, with a new one between two starts, and
    then once more, as the measured times ask for: the new one gets most virtual workers.
    """
    options = EXCHANGES[name]
    shards = first.member.shards if options.kind.has_shards else 0
    member = replace(first.member, options=options, shards=shards)
    first = replace(first, member=member, balances=True)
    undisturbed(first)
    expected, rows = model(tmp_path), shown(tmp_path)

    workers, kept = pause_all(first, 3)
    assert kept[2] is None  # it is the third: two hold a snapshot
    assert all(iteration % (options.local_steps or 4) == 0 for iteration in kept[:2])
    workers[0].end()  # lost

    with start(replace(first, goes_on=True), 2, rewind=kept[1]) as (own, addresses):
        newcomer = Worker(replace(documents(first, 3)[2], aside=True))
        assert newcomer.wait_for("paused")["snapshot"] is None
        go_on(workers[1:], own)
        connect(workers[1:], addresses)
        workers[1].reach(kept[1] + 2)
        workers[1].send("regroup")
        paused = [worker.wait_for("paused", regrouped=True) for worker in workers[1:]]
    iteration = paused[0]["snapshot"]
    assert iteration > kept[1]
    assert [one["snapshot"] for one in paused] == [iteration, iteration]

    workers = [*workers[1:], newcomer]
    with start(replace(first, goes_on=True), 3, rewind=iteration) as (own, addresses):
        go_on(workers, own)
        connect(workers, addresses)
        for worker in workers:
            times = worker.wait_for("timed")
            assert 0 < times["own_s"] <= times["whole_s"]
        workers[0].send("regroup")
        paused = [worker.wait_for("paused", regrouped=True) for worker in workers]
        iteration = paused[0]["snapshot"]
    goes_on = replace(first, goes_on=True)
    with start(goes_on, 3, rewind=iteration, speeds=(1, 1, 3)) as (own, addresses):
        assert own[0].member.by_worker.bounds == (0, 1, 2, 6)
        go_on(workers, own)
        connect(workers, addresses)
        finish(workers)
    assert model(tmp_path) == expected
    assert shown(tmp_path) == rows
    seconds = seconds_after(kept[1], tmp_path)
    assert seconds and seconds == sorted(seconds), "they count through the starts"


def test_snapshots_on_disk_are_written_from_those_in_memory(
    tmp_path: Path, first: JobDocument, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Histories are collected once for both; without copies in memory the files are the same."""
    collected = [0]
    histories = UnitedState.histories

    def counted(state: UnitedState) -> Mapping[int, History]:
        collected[-1] += 1
        return histories(state)

    monkeypatch.setattr(UnitedState, "histories", counted)
    found = []
    first = replace(first, settings=(*first.settings, "snapshot=8", "max_iter=24"))
    for copies in (1, 0):
        undisturbed(replace(first, copies=copies))
        paths = [tmp_path / f"snap_iter_{number}.solverstate" for number in (8, 16, 24)]
        found.append([path.read_bytes() for path in paths])
        collected.append(0)
    assert found[0] == found[1]
    assert collected[:2] == [1, 3]  # the last one: no iteration follows


def test_a_snapshot_on_disk_that_a_loss_came_before_is_written(
    tmp_path: Path, first: JobDocument, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers lose the second when the files of the newest memory snapshot are not there. The
    start from memory takes one snapshot for the files and for the next loss.
    """
    end = 28
    first = replace(first, settings=(*first.settings, "snapshot=4", f"max_iter={end}"))
    undisturbed(first)
    expected = {path: path.read_bytes() for path in tmp_path.glob("snap_iter_*.caffemodel")}
    assert len(expected) == end // 4
    workers, kept = pause_all(first, 2)
    workers[1].end()  # lost
    for path in tmp_path.glob("snap_iter_*"):
        path.unlink()
    begun, begin = [], SolverMemory.begin

    def noted(self: SolverMemory, iteration: int, *rest: Any) -> None:
        begun.append(iteration)
        begin(self, iteration, *rest)

    monkeypatch.setattr(SolverMemory, "begin", noted)
    with start(replace(first, goes_on=True), 1, rewind=kept[0]) as (own, addresses):
        go_on(workers[:1], own)
        connect(workers[:1], addresses)
        finish(workers[:1])
    assert begun == [*range(kept[0], end, 4)]
    for iteration in range(kept[0], end + 1, 4):
        path = tmp_path / f"snap_iter_{iteration}.caffemodel"
        assert path.read_bytes() == expected[path], iteration


def test_a_worker_without_the_snapshot_says_so(first: JobDocument) -> None:
    with start(first, 1, rewind=8) as (own, addresses):
        worker = Worker(own[0])
        connect([worker], addresses)
        message = worker.wait_for("error")["message"]
        assert message == "worker 0 has no memory snapshot of iteration 8"
        worker.end()
