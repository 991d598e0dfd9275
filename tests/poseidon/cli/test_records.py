"""`poseidon logs`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from poseidon.cli.main import main, parse_arguments, run_command
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registry
from poseidon.errors import JobError, UsageError
from poseidon.launcher.job_folder import register_job
from poseidon.observe.metrics.job_statistics import (
    FILE_NAME,
    JobStatistics,
    TensorStatistics,
    WorkerStatistics,
    encode_statistics,
)
from ps_server.trace import Trace, Track

HEAD = "1126 20:40:{:02d}.731869 29444 solver.cpp:294] "


def line(second: int, text: str) -> str:
    return f"I{HEAD.format(second)}{text}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "output" / "job-a"
    (folder / "from_hosts").mkdir(parents=True)
    (folder / "worker_0.log").write_text(line(1, "a") + line(4, "b"))
    (folder / "worker_1.log").write_text(line(9, "of an earlier launcher here"))
    (folder / "from_hosts" / "worker_1.log").write_text(line(2, "c"))
    (folder / "from_hosts" / "shard_1.log").write_text(line(3, "d") + "unfinished")
    (folder / "launcher.log").write_text("not of a process\n")
    (folder / "worker_x.log").write_text("nor this\n")
    return folder


def poseidon_logs(*words: str) -> int:
    return run_command(parse_arguments(["logs", *words]))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((), ["worker 0: a", "worker 1: c", "shard 1: d", "worker 0: b"]),
        (("--lines=2",), ["shard 1: d", "worker 0: b"]),
        (("--lines=0",), []),
        (("--worker=1",), ["c"]),
        (("--shard=1", "--follow"), ["d"]),
    ],
)
def test_lines_in_the_order_of_time(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], shown: list[str]
) -> None:
    assert poseidon_logs("job-a", *words) == 0
    said = capsys.readouterr().out.splitlines()
    assert [
        text.replace(text[text.find("I1126") : text.find("] ") + 2], "") for text in said
    ] == shown


def test_following_a_job_ends_with_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    registration = register_job("job-a", None, (), folder)
    end = partial(registration.__exit__, None, None, None)
    steps = iter([lambda: append("finished\n"), lambda: append(line(6, "e")), end])

    def append(text: str) -> None:
        with (folder / "from_hosts" / "shard_1.log").open("a") as file:
            file.write(text)

    monkeypatch.setattr(time, "sleep", lambda _: next(steps)())
    (Registry(folder.parents[1] / "state").folder / "junk.json").write_text("{")
    assert poseidon_logs("job-a", "--shard=1", "--follow") == 0
    said = capsys.readouterr()
    assert said.out == f"{line(3, 'd')}unfinishedfinished\n{line(6, 'e')}"
    assert not said.err, "the record of another job is not read"
    assert next(steps, None) is None


def test_a_process_that_begins_later_is_followed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    registration = register_job("job-a", None, (), folder)

    def begin_and_end(_: float) -> None:
        (folder / "worker_2.log").write_text(line(7, "e"))
        registration.__exit__(None, None, None)

    monkeypatch.setattr(time, "sleep", begin_and_end)
    assert poseidon_logs("job-a", "--lines=0", "--follow") == 0
    assert capsys.readouterr().out == f"worker 2: {line(7, 'e')}"


@pytest.mark.parametrize(
    ("words", "error", "sentence"),
    [
        (("job-a", "--worker=7"), JobError, "holds no log of worker 7; it has logs of worker 0"),
        (("empty",), JobError, "holds no log of a worker"),
        (("junk",), JobError, r"junk\.json is damaged or from a different version"),
        (("job-a", "--worker=0", "--shard=0"), UsageError, "--worker or --shard, not both"),
        (("job-a", "--lines=-1"), UsageError, "--lines=-1"),
    ],
)
def test_records_that_cannot_be_read_are_named(
    folder: Path, words: tuple[str, ...], error: type[Exception], sentence: str
) -> None:
    (folder.parent / "empty").mkdir()
    junk = Registry(folder.parents[1] / "state").folder / "junk.json"
    junk.parent.mkdir(parents=True, exist_ok=True)
    junk.write_text("{}")
    with pytest.raises(error, match=sentence):
        poseidon_logs(*words)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))


def folder_of_stats(name: str, *, ended_s: int = 1000) -> Path:
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
    folder_of_stats("one-1")
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
    elsewhere = folder_of_stats("two-2").rename(tmp_path / "elsewhere")
    record("two-2", elsewhere, started_s=1.0)
    assert first_line(capsys, "two-2") == "job two-2"


def test_without_a_job_the_newest_that_runs_else_the_newest_that_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, ended_s in (("a", 2000), ("b", 3000), ("c", 1000)):
        folder_of_stats(name, ended_s=ended_s)
    assert first_line(capsys) == "job b"
    for name, started_s in (("a", 20.0), ("c", 10.0)):
        record(name, Path("output") / name, started_s=started_s)
    record("just-begun", Path("output") / "just-begun", started_s=99.0)
    assert first_line(capsys) == "job a"


def test_without_a_job_a_job_of_another_folder_comes_last_and_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    folder_of_stats("far").rename(elsewhere)
    record("far", elsewhere, started_s=99.0)
    assert main(["stats"]) == 0
    assert capsys.readouterr().err == f"job far in ../{elsewhere.name}\n"
    folder_of_stats("ended")
    assert first_line(capsys) == "job ended"
    folder_of_stats("near")
    record("near", Path("output") / "near", started_s=1.0)
    assert first_line(capsys) == "job near"


def test_traces_become_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    made = folder_of_stats("one-1")
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
    traced_iterations(folder_of_stats("one-1"))
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
    traced_iterations(folder_of_stats("one-1"))
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
        (["../x"], "'../x' is neither a running job, nor a folder, nor a job in output/"),
        (["nonsense"], "does not hold statistics of a job"),
        (["home"], "home holds no statistics.json"),
        (["home", "--trace=all.json"], "home has no traces"),
        (["nonsense", "--trace=all.json"], "is not a trace"),
        (["nonsense", "--trace=nowhere/all.json"], "cannot write nowhere/all.json"),
        (["nonsense", "--trace=nonsense/trace_worker_0.json"], "is one of the job's own traces"),
        (["nonsense", "--picture=a.svg", "--rank=3"], "holds no trace of worker 3"),
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
    code = "import sys, poseidon.cli.records; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=50).returncode == 0


@pytest.fixture
def log(tmp_path: Path, repository: Path) -> Path:
    path = tmp_path / "train.log"
    shutil.copy(
        repository / "benchmarks" / "results" / "logs" / "cifar10_quick_lr1_4000-5000.log", path
    )
    return path


def test_tables_lie_beside_the_log_or_where_asked(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parse_log", str(log)]) == 0
    assert capsys.readouterr().out == f"Wrote {log}.train\nWrote {log}.test\n"
    assert main(["parse_log", str(log), str(log.parent / "out"), "--delimiter=;", "--verbose"]) == 0
    table = (log.parent / "train.log.test").read_bytes()
    assert table.startswith(b"NumIters,Seconds,LearningRate,accuracy,loss\r\n")
    assert (log.parent / "out" / "train.log.test").read_bytes() == table.replace(b",", b";")
    assert (log.parent / "train.log.train").is_file()


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_log_that_windows_has_written(log: Path, encoding: str) -> None:
    assert main(["parse_log", str(log)]) == 0
    table = (log.parent / "train.log.test").read_bytes()
    log.write_bytes(log.read_text().replace("\n", "\r\n").encode(encoding))
    (log.parent / "train.log.test").unlink()
    assert main(["parse_log", str(log)]) == 0
    assert (log.parent / "train.log.test").read_bytes() == table


@pytest.mark.parametrize(
    ("name", "flags"),
    [("curves.png", []), ("new/curves.svg", ["-x", "seconds"]), ("curves.svg", ["--chart=4"])],
)
def test_plot(log: Path, name: str, flags: list[str]) -> None:
    twin = log.parent / "second \udce9" / "train.log"
    twin.parent.mkdir()
    shutil.copy(log, twin)
    target = log.parent / name
    assert main(["plot", str(log), str(twin), "-o", str(target), *flags]) == 0
    content = target.read_bytes()
    assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    assert [path.name for path in target.parent.iterdir() if "partial" in path.name] == []


@pytest.mark.parametrize("word", ["output/quick-1", "quick-1", None])
def test_a_job_stands_for_the_log_of_its_first_worker(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str | None
) -> None:
    """Its id or its folder; the job that was started last needs no word."""
    monkeypatch.setenv("POSEIDON_HOME", str(log.parent / "home"))
    monkeypatch.chdir(log.parent)
    folder = Path("output/quick-1")
    folder.mkdir(parents=True)
    shutil.copy(log, folder / "worker_0.log")
    (folder / "statistics.json").write_text("{}")
    words = [] if word is None else [word]
    assert main(["plot", *words, "-o", "curves.svg"]) == 0
    assert "quick-1: test accuracy" in Path("curves.svg").read_text(encoding="utf-8")
    assert main(["parse_log", word or "quick-1"]) == 0
    assert (folder / "worker_0.log.test").is_file()
    (folder / "worker_0.log").unlink()
    assert main(["plot", *words, "-o", "curves.svg"]) == 1
    assert "quick-1 holds no log of worker 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["parse_log", "empty.log"], 1, "empty.log has no line of a net's output"),
        (["parse_log", "train.log", "--delimiter=ab"], 2, "--delimiter is 'ab'"),
        (["plot", "train.log", "-o", "c.jpg"], 2, "-o c.jpg: expected a name that ends in .png"),
        (["plot", "empty.log", "-o", "c.png"], 1, "empty.log has no line"),
        (["plot", "silent.log", "-o", "c.png", "-chart=0"], 2, "the logs have no accuracy to draw"),
    ],
)
def test_mistakes_of_parse_log(
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(log.parent)
    Path("empty.log").write_text("hello\n", encoding="utf-8")
    lines = [
        line for line in log.read_text(encoding="utf-8").splitlines() if "Test net" not in line
    ]
    Path("silent.log").write_text("\n".join(lines), encoding="utf-8")
    before = sorted(Path().iterdir())
    assert main(words) == code
    assert message in capsys.readouterr().err
    assert sorted(Path().iterdir()) == before
