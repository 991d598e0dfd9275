"""The listeners of a job: each alone, and all of them in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from poseidon.base.text_files import OutputLine
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.process import OutputStream
from poseidon.cluster.supervision.loop import JobListener
from poseidon.launcher.listeners import (
    REMOTE_LOGS,
    Listeners,
    PlanFile,
    RemoteLogs,
    StatisticsFile,
    StragglerReports,
)
from poseidon.observe.metrics.job_statistics import FILE_NAME, JobStatistics, read_statistics
from poseidon.observe.metrics.progress import JobProgress

LOCAL = ProcessName(role=Role.WORKER, index=0, client=0, host="127.0.0.1")
FAST = ProcessName(role=Role.WORKER, index=0, client=0, host="node0")
REMOTE = ProcessName(role=Role.WORKER, index=1, client=1, host="node1")
STDERR = OutputStream.STDERR
LINE = OutputLine(text="a line")
SHARD = ProcessName(role=Role.SHARD, index=2, client=1, host="node1")


class Recorder(JobListener):
    """Writes down its calls, and raises where it is asked to."""

    def __init__(self, name: str, calls: list[tuple[object, ...]], *, fails: bool = False) -> None:
        self._name = name
        self._calls = calls
        self._fails = fails

    def _record(self, *call: object) -> None:
        self._calls.append((self._name, *call))
        if self._fails:
            raise ValueError(self._name)

    def on_started(self) -> None:
        self._record("started")

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        self._record(name, event)

    def on_output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        self._record(name, stream, text)

    def on_log(self, name: ProcessName, stream: OutputStream, line: OutputLine) -> None:
        self._record(name, stream, line)

    def close(self) -> None:
        self._record("close")


def call_all(listener: JobListener) -> None:
    listener.on_started()
    listener.on_event(LOCAL, {"event": "alive"})
    listener.on_output(SHARD, STDERR, "a ")
    listener.on_log(SHARD, STDERR, LINE)
    listener.close()


def test_each_listener_gets_each_call_in_the_given_order() -> None:
    calls = list[tuple[object, ...]]()
    call_all(Listeners(Recorder("first", calls), JobListener(), Recorder("second", calls)))
    what: list[tuple[object, ...]] = [
        ("started",), (LOCAL, {"event": "alive"}), (SHARD, STDERR, "a "), (SHARD, STDERR, LINE), ("close",),
    ]  # fmt: skip
    assert calls == [(name, *call) for call in what for name in ("first", "second")]


def test_what_a_listener_raises_ends_the_call() -> None:
    calls = list[tuple[object, ...]]()
    listeners = Listeners(Recorder("first", calls, fails=True), Recorder("second", calls))
    with pytest.raises(ValueError, match="first"):
        listeners.on_log(LOCAL, STDERR, LINE)
    assert calls == [("first", LOCAL, STDERR, LINE)]


def test_a_worker_that_never_waits_while_the_other_does_is_reported() -> None:
    reported, now = list[str](), [0.0]
    stragglers = StragglerReports(reported.append, now=lambda: now[0])
    stragglers.on_started()
    for second in range(0, 200, 2):
        now[0] = float(second)
        for name, waited_s in ((FAST, second / 2), (REMOTE, 0.0)):
            stragglers.on_event(name, {"event": "progress", "iteration": second})
            stragglers.on_event(name, {"event": "alive", "waited_s": waited_s})
    (sentence,) = reported
    assert sentence.startswith("worker 1 (client 1, node1) slows the others down")


def test_a_worker_that_does_not_say_how_long_it_waited_is_no_straggler() -> None:
    reported = list[str]()
    stragglers = StragglerReports(reported.append, now=lambda: 0.0)
    for event in (
        {"event": "alive"},
        {"event": "alive", "waited_s": "long"},
        {"event": "progress"},
    ):
        stragglers.on_event(REMOTE, event)
    assert reported == []


def statistics_of(iterations: int) -> dict[str, object]:
    return {"event": "statistics", "iterations": iterations, "tensors": [{"name": "fc.0"}]}


class ManualClock:
    """A clock that is moved by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_the_plan_of_the_exchange_is_kept_for_the_next_start(tmp_path: Path) -> None:
    plans, said = PlanFile(tmp_path, lambda sentence: None), list[str]()
    assert plans.plan == ""
    plans.on_event(LOCAL, {"event": "exchange_plan", "plan": 3})
    plans.on_event(LOCAL, {"event": "exchange_plan", "plan": "first"})
    plans.on_event(LOCAL, {"event": "exchange_plan", "plan": "of a restart"})
    assert plans.plan == "first"
    assert (tmp_path / "exchange_plan.json").read_text() == "first"
    without = PlanFile(tmp_path / "nowhere", said.append)
    without.on_event(LOCAL, {"event": "exchange_plan", "plan": "first"})
    assert without.plan == "first"
    assert said == [
        f"warning: cannot write {tmp_path}/nowhere/exchange_plan.json: No such file or directory; "
        "the job continues without it"
    ]


@pytest.fixture
def statistics(tmp_path: Path, clock: ManualClock) -> StatisticsFile:
    return StatisticsFile("lenet-1", tmp_path, pytest.fail, now=clock)


def written(folder: Path) -> JobStatistics:
    return read_statistics(folder / FILE_NAME)


def test_the_last_statistics_of_each_process_are_kept(
    statistics: StatisticsFile, clock: ManualClock, tmp_path: Path
) -> None:
    statistics.on_event(REMOTE, statistics_of(3))
    clock.now_s += 60
    statistics.on_event(SHARD, {"event": "statistics", "bytes_in": 7})
    clock.now_s += 60
    statistics.on_event(REMOTE, statistics_of(9))
    found = written(tmp_path)
    assert found.job == "lenet-1"
    assert {rank: worker.iterations for rank, worker in found.workers.items()} == {1: 9}
    assert found.shards[2].bytes_in == 7
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_a_start_with_fewer_processes_has_their_statistics_alone(
    statistics: StatisticsFile, clock: ManualClock, tmp_path: Path
) -> None:
    statistics.on_event(REMOTE, statistics_of(3))
    statistics.on_event(SHARD, {"event": "statistics", "bytes_in": 7})
    statistics.on_started()
    assert set(written(tmp_path).workers) == {1}
    clock.now_s += 60
    statistics.on_event(LOCAL, statistics_of(9))
    assert (set(written(tmp_path).workers), set(written(tmp_path).shards)) == ({0}, set())


def test_many_at_once_are_written_once_and_the_last_at_the_end(
    statistics: StatisticsFile, tmp_path: Path
) -> None:
    for iterations in (1, 2, 3):
        statistics.on_event(LOCAL, statistics_of(iterations))
    assert written(tmp_path).workers[0].iterations == 1
    statistics.close()
    assert written(tmp_path).workers[0].iterations == 3


def test_a_job_without_statistics_leaves_no_file(
    statistics: StatisticsFile, tmp_path: Path
) -> None:
    statistics.on_event(LOCAL, {"event": "statistics", "iterations": "many"})
    statistics.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_without_room_for_statistics_is_one_warning(
    clock: ManualClock, tmp_path: Path
) -> None:
    said = list[str]()
    statistics = StatisticsFile("lenet-1", tmp_path / "nowhere", said.append, now=clock)
    for iterations in (1, 2):
        clock.now_s += 60
        statistics.on_event(LOCAL, statistics_of(iterations))
    statistics.close()
    (sentence,) = said
    assert sentence.startswith(f"warning: cannot write {tmp_path}/nowhere/{FILE_NAME}: No such")


def test_progress_is_kept_with_the_next_statistics(
    statistics: StatisticsFile, clock: ManualClock, tmp_path: Path
) -> None:
    for clock.now_s, iteration in ((0.0, 10), (10.0, 30)):
        event = {
            "event": "progress", "iteration": iteration, "max_iter": 40, "images": 0, "loss": float("nan"),
        }  # fmt: skip
        statistics.on_event(LOCAL, event)
        statistics.on_event(REMOTE, {**event, "iteration": 0})
    statistics.on_event(LOCAL, statistics_of(3))
    assert written(tmp_path).progress == JobProgress(iteration=30, max_iter=40, rate=2.0)


def test_lines_of_other_hosts_are_kept(tmp_path: Path) -> None:
    for _ in range(2):  # a job that starts again appends to the same files
        logs = RemoteLogs(tmp_path, pytest.fail)
        for name in (LOCAL, REMOTE, SHARD, REMOTE):
            line = OutputLine(text=f"a line of {name.short}\udc80")
            logs.on_log(name, OutputStream.STDOUT, line)
        logs.close()
        logs.close()
    kept = {path.name: path.read_text().splitlines() for path in (tmp_path / REMOTE_LOGS).iterdir()}
    assert kept == {
        "worker_1.log": ["a line of worker 1\\udc80"] * 4,
        "shard_2.log": ["a line of shard 2\\udc80"] * 2,
    }


def test_a_folder_without_room_for_logs_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / REMOTE_LOGS).write_text("in the way")
    said = list[str]()
    logs = RemoteLogs(tmp_path, said.append)
    for _ in range(3):
        logs.on_log(REMOTE, STDERR, LINE)
    logs.close()
    (sentence,) = said
    assert sentence.startswith(f"warning: cannot write {tmp_path}/{REMOTE_LOGS}: ")
