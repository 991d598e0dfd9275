"""Broken inputs through the real command line: each ends with one clear sentence and an exit
code, and leaves nothing.

Every case is a sound job with one thing broken. What the launcher can see must stop the job before
a process is started and before a file is written. What a worker finds by itself is met with the
worker as a thread of this process; what takes several processes, or has to cross their borders,
with true ones.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from poseidon.cli.main import main
from poseidon.launcher.site import Site
from tests.support.broken_jobs import (
    Broken,
    both,
    damaged_record,
    damaged_state,
    hosts,
    mixed_shapes,
    net,
    replace_database,
    saved_model,
    saved_state,
    spoil,
)
from tests.support.launcher_refusals import LAUNCHER
from tests.support.thread_launcher import start_thread

WORKER = (
    Broken(
        name="pictures-of-different-shapes",
        prepare=replace_database(mixed_shapes),
        says=r"net\.prototxt:2: layer 'data' \(Data\): .*record 3 \(key '00003'\) is 1 x 6 x 5 "
        r".*; set .*batch_size: 1",
    ),
    Broken(
        name="record-damaged",
        prepare=replace_database(damaged_record),
        says=r"record 1 \(key 'bad'\): the record is not a Datum",
    ),
    Broken(
        name="model-of-another-net",
        prepare=saved_model("w.caffemodel", outputs=7),
        flags=("--weights={}/w.caffemodel",),
        says=r"{}/w\.caffemodel: layer 'ip': blob 0 has shape 7x18 in the file, expected 10x",
    ),
    Broken(
        name="state-of-another-solver",
        prepare=both(saved_state(histories=8), saved_model("w.caffemodel")),
        flags=("--snapshot={}/s.solverstate",),
        says=r"{}/s\.solverstate has 8 history blobs; this net and solver type need 4",
    ),
    Broken(
        name="model-is-a-state",
        prepare=saved_state(),
        flags=("--weights={}/s.solverstate",),
        says=r"{}/s\.solverstate is not a model",
    ),
    Broken(
        name="state-with-a-damaged-history",
        prepare=both(damaged_state, saved_model("w.caffemodel")),
        flags=("--snapshot={}/s.solverstate",),
        says=r"{}/s\.solverstate: the history of 'conv\.0': ",
    ),
)
PROCESSES = (
    Broken(
        name="label-outside-the-classes",
        edit=(net("num_output: 10", "num_output: 3"),),
        says=r"net\.prototxt:10: layer 'loss' \(SoftmaxWithLoss\): label \d is outside 0\.\.2",
    ),
    Broken(
        name="model-cut-short",
        prepare=saved_model("w.caffemodel", cut=50),
        flags=("--weights={}/w.caffemodel",),
        says=r"{}/w\.caffemodel is not a model, or it is truncated",
    ),
)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test its own state folder and an empty working folder."""
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "job"
    made.mkdir()
    return made


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Check that no process outlives the command, but the template that tests share."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [child for child in left if "agent.template" not in " ".join(child.cmdline())]


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with its content, and every folder.

    LMDB's lock file is not counted: each reader makes it. Nor is what lies in a LevelDB database:
    LevelDB writes there to read.
    """
    found = (
        path
        for path in folder.rglob("*")
        if path.name != "lock.mdb" and not (path.parent / "CURRENT").exists()
    )
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in found
    }


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run the command.

    Return its exit code and the last line of standard error; check that there is no traceback.
    """
    try:
        code = main(words)
    except SystemExit as error:  # argparse
        code = int(error.code or 0)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err, err
    return code, err.strip().split("\n")[-1]


def check_sentence(case: Broken, folder: Path, code: int, sentence: str) -> None:
    assert re.search(case.says.replace("{}", re.escape(str(folder))), sentence), sentence
    assert code == case.code, sentence
    assert sentence.startswith("poseidon"), sentence
    assert len(sentence) < 600, sentence
    for noise in ("Error:", "Errno", "<class", "object at 0x"):
        assert noise not in sentence.replace("poseidon: error:", ""), sentence


@pytest.mark.parametrize("case", LAUNCHER, ids=str)
def test_launcher_refuses(
    case: Broken, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher refuses before a process starts, and writes nothing to disk."""
    words = spoil(case, folder)
    before = tree(folder)

    def start(*_: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(Site, "start", start)
    code, sentence = run(words, capsys)
    check_sentence(case, folder, code, sentence)
    assert tree(folder) == before


def check_job(case: Broken, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the job ends with the sentence, leaves nothing but its logs, and is not
    registered any more.
    """
    words = spoil(case, folder)
    before = set(tree(folder))
    code, sentence = run(words, capsys)
    check_sentence(case, folder, code, sentence)
    new = set(tree(folder)) - before
    # LevelDB tidies its folder whenever it is opened.
    mine = re.compile(
        r"output(/worker_\d+\.log|/statistics\.json|/metrics\.jsonl)?|train_lmdb/(LOG.*|MANIFEST-\d+|\d+\.(ldb|log))"
    )
    assert not [path for path in new if not mine.fullmatch(path)]
    assert not [path for path in tree(folder.parent / "home") if path.endswith(".json")]


@pytest.mark.parametrize("case", WORKER, ids=str)
def test_worker_refuses(
    case: Broken, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker finds it before or in the first iteration."""
    monkeypatch.setattr(Site, "start", start_thread)
    check_job(case, folder, capsys)


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("case", PROCESSES, ids=str)
def test_job_fails_cleanly(case: Broken, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker's process finds it: all processes end, and the user reads that worker's sentence."""
    check_job(case, folder, capsys)


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("nothing_left")
def test_sound_job_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The job that every case breaks is sound; and on one machine it takes free ports, though
    the machinefile's is taken.
    """
    with socket.create_server(("127.0.0.1", 0)) as other:
        hostfile = f"0 127.0.0.1 {other.getsockname()[1]}\n1 127.0.0.1 0\n"
        code, sentence = run(
            spoil(Broken(name="sound", edit=(hosts(hostfile),), says=""), folder), capsys
        )
    assert code == 0, sentence
    assert (folder / "snap_iter_2.caffemodel").is_file()
