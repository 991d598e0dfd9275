"""The sinks of a job's records: files, TensorBoard and Prometheus, read back with their own
libraries.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.errors import JobError
from poseidon.launcher import sinks
from poseidon.launcher.sinks import (
    JobRecords,
    JsonLines,
    Prometheus,
    RecordSink,
    TensorBoard,
    scalars,
)
from poseidon.observe.metrics.job_records import (
    Record,
    progress_record,
    shard_record,
    worker_record,
)
from poseidon.observe.metrics.netoutputs import LoggedMeans
from poseidon.observe.metrics.progress import JobProgress
from ps_server.statistics import ShardStatistics
from tests.support.polling import until

WORKER = ProcessName(role=Role.WORKER, index=0, client=0, host="node0")
OTHER = ProcessName(role=Role.WORKER, index=1, client=1, host="node1")
SHARD = ProcessName(role=Role.SHARD, index=0, client=0, host="node0")
TRAINED = {
    "event": "trained",
    "iteration": 100,
    "loss": 1.5,
    "rate": 0.01,
    "outputs": [["loss", 1.25]],
}
TESTED = {"event": "tested", "iteration": 100, "net": 0, "scores": [["accuracy", "0.75"]]}
PROGRESS = {"event": "progress", "iteration": 100, "max_iter": 400, "images": 1000, "loss": 1.5}
ALIVE = {
    "event": "alive",
    "still_s": 0.1,
    "waited_s": 3.5,
    "read_s": 0.5,
    "host_busy": 0.25,
    "sending_s": {"10.0.0.2": 1.5},
    "most_lead": 3,
}
STATISTICS = {
    "event": "statistics",
    "bytes_in": 7,
    "bytes_out": 8,
    "busy_s": 0.5,
    "queue": 2,
    "stalled_s": 0.25,
    "sending_s": {"10.0.0.2": 2.5},
}


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def records(
    *outputs: RecordSink,
    warnings: list[str] | None = None,
    clock: Clock | None = None,
    job: Callable[[], Mapping[str, Any]] = lambda: {"job": "lenet-1", "workers": 2, "shards": 1},
) -> JobRecords:
    """Return a listener of a job with two workers and a shard."""
    found = [] if warnings is None else warnings
    time = clock or Clock()
    return JobRecords(job, list(outputs), found.append, now=time, monotonic=time)


def play(listener: JobRecords) -> None:
    """Let a short job happen."""
    listener.on_started()
    listener.on_event(WORKER, PROGRESS)
    listener.on_event(WORKER, TRAINED)
    listener.on_event(WORKER, TESTED)
    listener.on_event(OTHER, {**PROGRESS, "iteration": 99})
    listener.on_event(OTHER, ALIVE)
    listener.on_event(SHARD, STATISTICS)
    listener.on_event(
        WORKER, {"event": "snapshot", "iteration": 100, "state": "/x/s.solverstate", "seconds": 0.1}
    )
    listener.ended("finished")
    listener.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def page_of(served: Prometheus) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


@pytest.fixture
def served() -> Iterator[Prometheus]:
    made = Prometheus(0, "job-1")
    yield made
    made.close()


def test_a_job_leaves_one_line_of_json_for_each_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    play(records(JsonLines(path)))
    found = lines(path)
    assert [record["kind"] for record in found] == [
        "start", "progress", "train", "test", "worker", "shard", "snapshot", "end",
    ]  # fmt: skip
    assert {record["time"] for record in found} == {1000.0}
    assert found[0] == {
        "time": 1000.0,
        "kind": "start",
        "job": "lenet-1",
        "workers": 2,
        "shards": 1,
    }
    assert found[4] == {
        "time": 1000.0, "kind": "worker", "index": 1, "client": 1, "host": "node1", "iteration": 99, "waited_s": 3.5,
        "still_s": 0.1, "read_s": 0.5, "host_busy": 0.25, "sending_s": {"10.0.0.2": 1.5}, "most_lead": 3,
    }  # fmt: skip
    assert (found[5]["bytes_in"], found[5]["busy_s"], found[5]["queue"]) == (7, 0.5, 2)
    assert (found[5]["stalled_s"], found[5]["sending_s"]) == (0.25, {"10.0.0.2": 2.5})
    assert found[-1] == {"time": 1000.0, "kind": "end", "outcome": "finished", "iteration": 100}


def test_a_process_is_recorded_at_most_every_few_seconds(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "metrics.jsonl"
    listener = records(JsonLines(path), clock=clock)
    for _ in range(10):
        listener.on_event(WORKER, ALIVE)
        listener.on_event(OTHER, ALIVE)
        listener.on_event(WORKER, PROGRESS)
        clock.now_s += 1.0
    listener.close()
    kinds = [(record["kind"], record.get("index")) for record in lines(path)]
    assert kinds == [("worker", 0), ("worker", 1), ("progress", None)] * 2


def test_the_last_record_of_a_process_is_written_at_the_end(tmp_path: Path) -> None:
    """It has the clock that the job has ended at."""
    path = tmp_path / "metrics.jsonl"
    listener = records(JsonLines(path))
    listener.on_started()
    for iteration in (1, 2, 3):
        listener.on_event(WORKER, {**PROGRESS, "iteration": iteration})
        listener.on_event(WORKER, ALIVE)
    listener.ended("finished")
    listener.close()
    found = [(record["kind"], record.get("iteration")) for record in lines(path)]
    assert found[1:] == [
        ("progress", 1), ("worker", 1), ("progress", 3), ("worker", 3), ("end", 3),
    ]  # fmt: skip


LOGGED = {"event": "logged", "iteration": 100, "values": {"loss": 2.0, "lr": 0.5, "a/b": 1.0}}


def test_what_workers_log_is_recorded_as_its_means(tmp_path: Path) -> None:
    """Once both have gone on, after some seconds without the other, at a restart and at the end."""
    clock, path = Clock(), tmp_path / "metrics.jsonl"
    listener = records(JsonLines(path), clock=clock)
    listener.on_started()
    listener.on_event(WORKER, LOGGED)
    listener.on_event(OTHER, {**LOGGED, "values": {"loss": 3.0, "lr": 0.5, "a/b": None}})
    for name in (WORKER, OTHER):
        listener.on_event(name, {**LOGGED, "iteration": 101})
    listener.on_event(SHARD, LOGGED)
    clock.now_s += 60.0
    listener.on_event(OTHER, ALIVE)
    listener.on_event(WORKER, {**LOGGED, "iteration": 102})
    listener.on_started()
    listener.on_event(WORKER, LOGGED)
    listener.ended("finished")
    listener.close()
    found = [record for record in lines(path) if record["kind"] != "worker"]
    assert [(record["kind"], record.get("iteration")) for record in found] == [
        *(("start", None), ("train", 100), ("train", 101), ("train", 102)),
        *(("start", None), ("train", 100), ("end", None)),
    ]
    assert found[1] == {
        "time": 1000.0,
        "kind": "train",
        "iteration": 100,
        "loss": 2.5,
        "rate": 0.5,
        "outputs": {"loss": 2.5, "lr": 0.5, "a/b": None},
    }


def test_a_start_has_the_processes_of_that_start(tmp_path: Path) -> None:
    """Means wait for the workers that there are then."""
    path, counts = tmp_path / "metrics.jsonl", iter([2, 2, 1])
    listener = records(JsonLines(path), job=lambda: {"job": "j", "workers": next(counts)})
    for _ in range(2):
        listener.on_started()
        listener.on_event(WORKER, LOGGED)
        listener.on_event(WORKER, {**LOGGED, "iteration": 101})
        listener.on_event(WORKER, TESTED)
    listener.close()
    found = [(record["kind"], record.get("workers")) for record in lines(path)]
    assert found == [
        *(("start", 2), ("test", None), ("train", None), ("train", None)),
        *(("start", 1), ("train", None), ("test", None)),
    ]


def test_a_script_without_a_loss_leaves_the_last_one(served: Prometheus) -> None:
    for values in ({"loss": 2.0, "lr": 0.5}, {"accuracy": 0.75}):
        means = LoggedMeans(1)
        means.add(0, {"iteration": 1, "values": values}, 0.0)
        (record,) = means.due(0.0, everything=True)
        served.write(record)
        assert scalars(record)["train/total_loss"] == values.get("loss")
    page = page_of(served)
    assert 'poseidon_loss{job="job-1"} 2.0' in page
    assert 'poseidon_learning_rate{job="job-1"} 0.5' in page
    assert 'poseidon_train_output{job="job-1",output="accuracy"} 0.75' in page


def test_a_job_that_never_started_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    listener = records(JsonLines(path))
    listener.ended("failed")
    listener.close()
    assert not path.exists()


def test_a_sink_that_fails_is_one_warning_and_the_others_go_on(tmp_path: Path) -> None:
    calls, path, warnings = list[Record](), tmp_path / "metrics.jsonl", list[str]()

    def fail(record: Record) -> None:
        calls.append(record)
        raise OSError(28, "No space left on device")

    # without `close`: a sink that has failed gets nothing more
    broken: Any = SimpleNamespace(name="the disk", write=fail)
    play(records(broken, JsonLines(path), warnings=warnings))
    assert warnings == ["no more is written to the disk: No space left on device"]
    assert len(calls) == 1
    assert len(lines(path)) == 8


def test_a_sink_that_is_stuck_delays_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "MOST_WAITING", 3)
    release, written = threading.Event(), list[bool]()
    stuck: Any = SimpleNamespace(
        name="stuck", write=lambda record: written.append(release.wait()), close=lambda: None
    )
    listener = records(stuck)
    for _ in range(100):  # more than the queue holds: this would never return
        listener.on_event(WORKER, TRAINED)
    release.set()
    listener.close()
    assert 1 <= len(written) <= 4


def test_a_thread_that_cannot_start_stays_the_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    listener = records(JsonLines(tmp_path / "metrics.jsonl"))
    for act in (lambda: listener.on_event(WORKER, TRAINED), listener.close):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            act()


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    play(records(TensorBoard(tmp_path)))
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    found = {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
    assert found["train/total_loss"] == [(100, 1.5)]
    assert found["train/loss"] == [(100, 1.25)]
    assert found["train/learning_rate"] == [(100, pytest.approx(0.01))]
    assert found["test_0/accuracy"] == [(100, 0.75)]
    assert found["waited_s/worker_1"] == [(99, 3.5)]


def test_prometheus_fetches_the_latest_values(served: Prometheus) -> None:
    pages: list[str] = []

    def fetch(record: Record) -> None:
        if record["kind"] == "end":
            pages.append(page_of(served))

    last: Any = SimpleNamespace(name="fetch", write=fetch, close=lambda: None)
    play(records(served, last))
    for line in (
        'poseidon_loss{job="job-1"} 1.5',
        'poseidon_train_output{job="job-1",output="loss"} 1.25',
        'poseidon_test_output{job="job-1",net="0",output="accuracy"} 0.75',
        'poseidon_iteration{job="job-1"} 100.0',
        'poseidon_worker_waited_seconds{host="node1",job="job-1",rank="1"} 3.5',
        'poseidon_shard_queue{host="node0",index="0",job="job-1"} 2.0',
        'poseidon_starts{job="job-1"} 1.0',
    ):
        assert line in pages[0]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", served.port), timeout=5).close()


def test_prometheus_forgets_processes_at_a_start(served: Prometheus) -> None:
    worker = {"kind": "worker", "index": 3, "host": "node3", "iteration": 7, "waited_s": 1.5}
    for record, known in ((worker, True), ({"kind": "start"}, False)):
        served.write(record)
        assert ("node3" in page_of(served)) is known


def test_a_connection_that_is_reset_prints_nothing(
    served: Prometheus, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as stranger:
        stranger.sendall(b"GET /metr")
        # close() resets
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert "poseidon_iteration" in page_of(served)
    served.close()
    until(
        lambda: not any("poseidon-metrics" in t.name for t in threading.enumerate()), "no end", 60.0
    )
    assert capsys.readouterr() == ("", "")


def test_a_port_or_a_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(JobError, match=f"--metrics_port={port}: .*in use"):
            Prometheus(port, "lenet-1")
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match=r"--tensorboard_dir: cannot write to .*file/logs"):
        TensorBoard(tmp_path / "file" / "logs")


def test_the_dashboard_and_the_page_name_every_value(served: Prometheus) -> None:
    names = set(re.findall(r"# TYPE (\w+) ", page_of(served)))
    root = Path(__file__).parents[3]
    dashboard = json.loads((root / "examples" / "grafana" / "poseidon.json").read_text())
    used = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"poseidon_\w+", target["expr"])
    }
    assert used <= names
    page = (root / "docs" / "metrics.md").read_text()
    assert {name for name in names if f"`{name}`" not in page} == set()
    worker = worker_record({"waited_s": 0.0, "still_s": 0.0}, 0)
    assert worker is not None
    for record in (worker, shard_record(ShardStatistics(), {}), progress_record(JobProgress())):
        assert {name for name in record if f"`{name}`" not in page} == set()


def test_the_gpu_of_a_worker_is_recorded_and_served(served: Prometheus, tmp_path: Path) -> None:
    path, gpu = tmp_path / "metrics.jsonl", {"memory_bytes": 5, "busy": 0.75}
    listener = records(JsonLines(path))
    listener.on_event(WORKER, {**ALIVE, "gpu": {**gpu, "temperature_c": None}})
    listener.on_event(OTHER, {**ALIVE, "gpu": {"busy": "much"}})
    listener.close()
    found = lines(path)
    assert [record.get("gpu") for record in found] == [gpu, None]
    for record in found:
        served.write(record)
    values = [line for line in page_of(served).splitlines() if line.startswith("poseidon_gpu")]
    labels = '{host="node0",job="job-1",rank="0"}'
    assert values == [f"poseidon_gpu_memory_bytes{labels} 5.0", f"poseidon_gpu_busy{labels} 0.75"]
