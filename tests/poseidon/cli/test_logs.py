"""`poseidon logs`."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from poseidon.cli.main import parse_arguments, run_command
from poseidon.cluster.jobs.registry import Registry
from poseidon.errors import JobError, UsageError
from poseidon.launcher.job_folder import register_job

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
        (
            ("job-a", "--worker=7"),
            JobError,
            "holds no log of worker 7; it has logs of worker 0, worker 1, shard 1",
        ),
        (("empty",), JobError, "holds no log of a worker"),
        (("absent",), JobError, "neither a running job, nor a folder"),
        (("junk",), JobError, r"junk\.json is damaged or from a different version"),
        (("job-a", "--worker=0", "--shard=0"), UsageError, "two processes"),
        (("job-a", "--lines=-1"), UsageError, "--lines=-1"),
    ],
)
def test_mistakes(
    folder: Path, words: tuple[str, ...], error: type[Exception], sentence: str
) -> None:
    (folder.parent / "empty").mkdir()
    junk = Registry(folder.parents[1] / "state").folder / "junk.json"
    junk.parent.mkdir(parents=True, exist_ok=True)
    junk.write_text("{}")
    with pytest.raises(error, match=sentence):
        poseidon_logs(*words)
