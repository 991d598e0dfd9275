from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from poseidon.cluster.plan import ProcessName, Role
from poseidon.launch.statistics_file import StatisticsFile
from poseidon.metrics.job_statistics import FILE_NAME, JobStatistics, read_statistics
from poseidon.metrics.progress import JobProgress


class Heard:
    """Callbacks that write down what they hear."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def on_started(self) -> None:
        self.said.append("started")

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        self.said.append(event)

    def on_log(self, name: ProcessName, line: str) -> None:
        self.said.append(line)


def name(role: Role, index: int) -> ProcessName:
    return ProcessName(role=role, index=index, client=0, host="127.0.0.1")


def worker(iterations: int) -> dict[str, object]:
    return {"event": "statistics", "iterations": iterations, "tensors": [{"name": "fc.0"}]}


class Minutes:
    """A clock that is moved by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make(folder: Path) -> tuple[StatisticsFile, Heard, Minutes]:
    heard, clock = Heard(), Minutes()
    return StatisticsFile(heard, "lenet-1", folder, now=clock), heard, clock


def written(folder: Path) -> JobStatistics:
    return read_statistics(folder / FILE_NAME)


def test_the_last_of_each_process_is_kept(tmp_path: Path) -> None:
    keeper, _, clock = make(tmp_path)
    keeper.on_event(name(Role.WORKER, 1), worker(3))
    clock.now_s += 60
    keeper.on_event(name(Role.SHARD, 0), {"event": "statistics", "bytes_in": 7})
    clock.now_s += 60
    keeper.on_event(name(Role.WORKER, 1), worker(9))
    found = written(tmp_path)
    assert found.job == "lenet-1"
    assert {rank: said.iterations for rank, said in found.workers.items()} == {1: 9}
    assert found.shards[0].bytes_in == 7
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_many_at_once_are_written_once_and_the_last_at_the_end(tmp_path: Path) -> None:
    keeper, _, _ = make(tmp_path)
    for iterations in (1, 2, 3):
        keeper.on_event(name(Role.WORKER, 0), worker(iterations))
    assert written(tmp_path).workers[0].iterations == 1
    keeper.close()
    assert written(tmp_path).workers[0].iterations == 3


def test_a_job_that_says_nothing_leaves_nothing(tmp_path: Path) -> None:
    keeper, _, _ = make(tmp_path)
    keeper.on_event(name(Role.WORKER, 0), {"event": "statistics", "iterations": "many"})
    keeper.close()
    assert not list(tmp_path.iterdir())


def test_all_is_handed_on(tmp_path: Path) -> None:
    keeper, heard, _ = make(tmp_path)
    keeper.on_started()
    keeper.on_event(name(Role.WORKER, 0), worker(1))
    keeper.on_log(name(Role.WORKER, 0), "a line")
    assert heard.said == ["started", worker(1), "a line"]


def test_a_folder_that_cannot_be_written_to_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper, heard, clock = make(tmp_path / "nowhere")
    for iterations in (1, 2):
        clock.now_s += 60
        keeper.on_event(name(Role.WORKER, 0), worker(iterations))
    keeper.close()
    assert len(heard.said) == 2
    assert capsys.readouterr().err.count("warning: cannot write") == 1


def test_progress_is_kept_with_the_next_statistics(tmp_path: Path) -> None:
    keeper, _, clock = make(tmp_path)
    for clock.now_s, iteration in ((0.0, 10), (10.0, 30)):
        event = {
            "event": "progress",
            "iteration": iteration,
            "max_iter": 40,
            "images": 0,
            "loss": float("nan"),
        }
        keeper.on_event(name(Role.WORKER, 0), event)
        keeper.on_event(name(Role.WORKER, 1), {**event, "iteration": 0})
    keeper.on_event(name(Role.WORKER, 0), worker(3))
    assert written(tmp_path).progress == JobProgress(iteration=30, max_iter=40, rate=2.0)
