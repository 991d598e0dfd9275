from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from poseidon.cli.main import main
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registry
from poseidon.observe.metrics.job_statistics import (
    FILE_NAME,
    JobStatistics,
    TensorStatistics,
    WorkerStatistics,
    encode_statistics,
)
from ps_server.trace import Trace, Track


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))


def folder(name: str, *, ended_s: int = 1000) -> Path:
    """An output folder with statistics."""
    made = Path("output") / name
    made.mkdir(parents=True)
    worker = WorkerStatistics(
        iterations=2, tensors=(TensorStatistics(name="fc.0", bytes_out=4, bytes_in=6),)
    )
    (made / FILE_NAME).write_text(encode_statistics(JobStatistics(job=name, workers={0: worker})))
    os.utime(made / FILE_NAME, (ended_s, ended_s))
    return made


def record(job: str, output: Path, *, started_s: float) -> None:
    launcher = RecordedProcess(name="launcher", host="127.0.0.1", pid=1, created="0.0")
    Registry(Path("home").absolute()).write(
        JobRecord(
            job=job,
            launcher=launcher,
            hostfile=None,
            hosts=(),
            output=str(output.absolute()),
            started_s=started_s,
        )
    )


def first_line(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["stats", *map(str, words)]) == 0
    return capsys.readouterr().out.split(":")[0]


def test_a_job_by_its_folder_or_its_id(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder("one-1")
    assert main(["stats", "output/one-1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "job one-1: 1 worker, 2 iterations, 0 shards"
    assert lines[-2].split()[:3] == ["fc.0", "2", "3"]
    start = {"kind": "start", "time": 1.0, "job": "one-1", "script": True}
    train = {"kind": "train", "time": 2.0, "iteration": 1000, "outputs": {"loss": 0.5, "a": None}}
    metrics = tmp_path / "output" / "one-1" / "metrics.jsonl"
    metrics.write_text(f"{json.dumps(start)}\n{json.dumps(train)}\n")
    assert main(["stats", "output/one-1"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[-3:]] == [
        ["last", "value", "of", "iteration", "mean", "over", "workers"],
        ["loss", "1,000", "0.5"],
        ["a", "1,000", "-"],
    ]
    assert first_line(capsys, "one-1") == "job one-1"
    assert main(["stats", "one-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"] == "one-1"
    elsewhere = folder("two-2").rename(tmp_path / "elsewhere")
    record("two-2", elsewhere, started_s=1.0)
    assert first_line(capsys, "two-2") == "job two-2"


def test_without_a_job_the_newest_that_runs_else_the_newest_that_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, ended_s in (("a", 2000), ("b", 3000), ("c", 1000)):
        folder(name, ended_s=ended_s)
    assert first_line(capsys) == "job b"
    for name, started_s in (("a", 20.0), ("c", 10.0)):
        record(name, Path("output") / name, started_s=started_s)
    record("just-begun", Path("output") / "just-begun", started_s=99.0)
    assert first_line(capsys) == "job a"


def test_without_a_job_a_job_of_another_folder_comes_last_and_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    folder("far").rename(elsewhere)
    record("far", elsewhere, started_s=99.0)
    assert main(["stats"]) == 0
    assert capsys.readouterr().err == f"job far in ../{elsewhere.name}\n"
    folder("ended")
    assert first_line(capsys) == "job ended"
    folder("near")
    record("near", Path("output") / "near", started_s=1.0)
    assert first_line(capsys) == "job near"


def test_traces_become_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    made = folder("one-1")
    for process in ("worker_0", "shard_0"):
        trace = Trace(made / f"trace_{process}.json", process=process)
        trace.span(Track.COMPUTE, "forward", process, trace.now())
        trace.close()
    assert main(["stats", "one-1", "--trace=all.json"]) == 0
    assert "of 2 processes" in capsys.readouterr().out
    events = json.loads(Path("all.json").read_text(encoding="utf-8"))
    assert {event["name"] for event in events if event["ph"] == "X"} == {
        "forward worker_0",
        "forward shard_0",
    }


def traced_iterations(made: Path) -> None:
    trace = Trace(made / "trace_worker_0.json", process="worker 0")
    for i in range(3):
        began = trace.now()
        trace.span(Track.COMPUTE, "wait", "fc.0", trace.now())
        trace.span(Track.COMPUTE, "iteration", str(i), began)
    trace.close()


def test_an_iteration_becomes_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    traced_iterations(folder("one-1"))
    assert main(["stats", "one-1", "--picture=p.svg"]) == 0
    assert capsys.readouterr().out.startswith("p.svg: worker 0, iteration 1: ")
    assert "<svg" in Path("p.svg").read_text(encoding="utf-8")
    assert main(["stats", "one-1", "--picture=p.png", "--iteration=0"]) == 0
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--picture=p.gif"], 2, "expected a name that ends in .png"),
        (["--picture=p.svg", "--iteration=7"], 1, "it has 0 to 1"),
        (["--picture=nowhere/p.svg"], 1, "cannot write nowhere/p.svg"),
    ],
)
def test_pictures_that_cannot_be_made(
    flags: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    traced_iterations(folder("one-1"))
    assert main(["stats", "one-1", *flags]) == code
    assert words in capsys.readouterr().err


def write_nonsense() -> None:
    Path("nonsense").mkdir()
    (Path("nonsense") / FILE_NAME).write_text("{")
    (Path("nonsense") / "trace_worker_0.json").write_text("{")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no job is running, and output/ holds none"),
        (["lenet-9"], "'lenet-9' is neither a running job, nor a folder, nor a job in output/"),
        (["../x"], "'../x' is neither"),
        (["nonsense"], "does not hold statistics of a job"),
        (["home"], "home holds no statistics.json"),
        (["home", "--trace=all.json"], "home has no traces"),
        (["nonsense", "--trace=all.json"], "is not a trace"),
        (["nonsense", "--trace=nowhere/all.json"], "cannot write nowhere/all.json"),
        (["nonsense", "--trace=nonsense/trace_worker_0.json"], "is one of the job's own traces"),
        (["nonsense", "--picture=a.svg"], "is not a trace"),
        (["nonsense", "--picture=a.svg", "--rank=3"], "holds no trace of worker 3"),
        (["home", "--picture=a.svg"], "home has no traces"),
    ],
)
def test_what_it_cannot_show(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_nonsense()
    Path("home").mkdir()
    assert main(["stats", *words]) == 1
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_tables_need_no_matplotlib() -> None:
    """Its first import takes seconds, and prints a line about fonts."""
    code = "import sys, poseidon.cli.stats; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=50).returncode == 0
