"""A job's folder and record, and how they are found again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from poseidon.cluster.jobs.registry import Registry
from poseidon.errors import DataError, JobError, SnapshotError
from poseidon.launcher.job_folder import (
    LogLines,
    find_snapshot,
    find_training_log,
    is_running,
    output_folder,
    read_training_log,
    register_job,
    remove_unused,
)
from poseidon.launcher.listeners import REMOTE_LOGS
from poseidon.launcher.sinks import FILE_NAME as METRICS_FILE
from poseidon.launcher.site import read_hosts


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))


def test_a_job_is_on_record_until_it_ends(tmp_path: Path) -> None:
    with register_job("j-1", str(tmp_path / "hosts"), read_hosts(None, 1), tmp_path / "out"):
        record = Registry(tmp_path / "home").read("j-1")
        assert record is not None
        assert (record.launcher.pid, record.hostfile) == (os.getpid(), str(tmp_path / "hosts"))
    assert Registry(tmp_path / "home").read("j-1") is None


@pytest.mark.parametrize(
    ("made", "written", "left"), [(False, "", False), (False, "x", True), (True, "", True)]
)
def test_a_job_that_never_started_leaves_no_folder(
    tmp_path: Path, made: bool, written: str, left: bool
) -> None:
    """Its logs stay where they say something, and so does a folder that was there before."""
    folder = tmp_path / "output" / "job"
    if made:
        folder.mkdir(parents=True)
    with pytest.raises(JobError, match="no"), output_folder(folder):
        (folder / "worker_0.log").write_text(written)
        (folder / "statistics.json").write_text("{}")
        raise JobError("no")
    assert folder.exists() == left


def test_derived_files_do_not_keep_a_folder(tmp_path: Path) -> None:
    given = tmp_path / "job" / "solver.prototxt"
    given.parent.mkdir()
    given.write_text("max_iter: 1")
    remove_unused(given.parent)
    assert given.exists()
    remove_unused(given.parent, [given])
    assert not given.parent.exists()


def test_a_training_log_is_named_by_itself_or_by_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "output" / "j-1"
    (folder / REMOTE_LOGS).mkdir(parents=True)
    with pytest.raises(DataError, match="holds no log of worker 0"):
        find_training_log("j-1")
    log = folder / REMOTE_LOGS / "worker_0.log"
    log.write_text("")
    assert find_training_log("j-1") == (
        "j-1",
        Path("output") / "j-1" / REMOTE_LOGS / "worker_0.log",
    )
    assert find_training_log(str(log)) == ("worker_0.log", log)
    with pytest.raises(DataError, match=r"^there is no log none.log"):
        find_training_log("none.log")
    start = {"kind": "start", "time": 1.0, "job": "j-1"}
    metrics = folder / METRICS_FILE
    metrics.write_text(json.dumps(start) + "\n")
    assert find_training_log("j-1")[1].name == "worker_0.log"
    metrics.write_text(json.dumps({**start, "script": True}) + "\n")
    assert find_training_log("j-1") == ("j-1", Path("output") / "j-1" / METRICS_FILE)
    with pytest.raises(DataError, match=r"no logged value; call group.log"):
        read_training_log(metrics)
    train = {"kind": "train", "time": 2.0, "iteration": 5, "outputs": {"loss": 0.5}}
    with metrics.open("a") as file:
        file.write(f"{json.dumps(train)}\n{json.dumps(train)[:20]}")
    (row,) = read_training_log(metrics).train
    assert (row.iteration, row.seconds, row.outputs) == (5, 1.0, {"loss": 0.5})
    with pytest.raises(JobError, match="no job is running"):
        find_training_log(None)


def test_a_snapshot_that_a_prefix_puts_elsewhere_is_found_by_the_job(tmp_path: Path) -> None:
    folder, state = tmp_path / "job", tmp_path / "snap_iter_20.solverstate"
    folder.mkdir()
    other = tmp_path / "script_step_30.pt"
    other.write_bytes(b"")
    paths = [str(state), str(tmp_path / "removed_iter_40.solverstate"), str(other)]
    lines = [
        json.dumps({"time": 1.0, "kind": "snapshot", "iteration": 20, "path": path})
        for path in paths
    ]
    (folder / "metrics.jsonl").write_text("\n".join(["[]", "{", *lines, '{"kind": "end"}']))
    with pytest.raises(SnapshotError, match="has no snapshot; expected a file"):
        find_snapshot(str(folder))
    state.write_bytes(b"")
    assert find_snapshot(str(folder)) == state
    own = folder / "own_iter_10.solverstate"
    own.write_bytes(b"")
    assert find_snapshot(str(folder)) == own


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/dev/zero", "it is a device"),
        ("pipe", "nothing was written to the pipe"),
        (".", "Is a dir"),
    ],
)
def test_a_log_that_has_no_end_is_not_read(
    path: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poseidon.base.foreign_files.PIPE_SILENT_S", 0.01)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=f"^cannot read the log .*{path}: {why}"):
        read_training_log(tmp_path / path)


def test_lines_of_a_growing_log_are_whole(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, (tmp_path / "log").open() as reader:
        lines = LogLines(reader)
        log.write("one\ntw")
        log.flush()
        assert list(lines) == ["one"]
        log.write("o\nthree\n")
        log.flush()
        assert list(lines) == ["two", "three"]
        assert list(lines) == []


def test_two_running_jobs_have_two_folders(tmp_path: Path) -> None:
    with register_job("j-1", None, read_hosts(None, 1), tmp_path / "out"):
        words = rf"out is the folder of the job j-1, which runs \(launcher pid {os.getpid()}\)"
        with pytest.raises(JobError, match=words):
            register_job("j-2", None, read_hosts(None, 1), tmp_path / "a" / ".." / "out")
        assert Registry(tmp_path / "home").jobs() == ("j-1",)
        with register_job("j-3", None, read_hosts(None, 1), tmp_path / "other"):
            pass
    with register_job("j-4", None, read_hosts(None, 1), tmp_path / "out"):
        pass


def test_a_job_runs_while_its_launcher_does(tmp_path: Path) -> None:
    assert not is_running(tmp_path / "out")
    with register_job("j-1", None, read_hosts(None, 1), tmp_path / "out"):
        assert is_running(tmp_path / "out")
        assert not is_running(tmp_path)
