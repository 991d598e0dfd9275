"""What a script writes: to its launcher as it is, to its log line by line."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from poseidon.engine.document import Prints
from poseidon.torch.script_output import ScriptLog, ScriptStream

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from poseidon.engine.document import Prints
from poseidon.torch.script_output import output_to_log

def write(log, prints):
    with output_to_log(log, prints):
        print("a", 1, end="")
        print("b", file=sys.__stdout__)
        for part in (0, 50, 100):
            sys.stderr.write(f"\\r{part:3}%|")
            sys.stderr.flush()
        print(file=sys.stderr)
        sys.stdout.buffer.write(b"\\xff\\n")
        print("\\udcfe", "\\ud800".encode("utf-8", "backslashreplace").decode())
        print("\\ud800", file=sys.stderr)
        subprocess.run(["echo", "from a child"])
        print("no end", end="")
        assert not sys.stdout.isatty()
    os.write(1, b"|after")

for prints in Prints:
    if os.fork() == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{prints.value}.{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
        write(Path(f"{prints.value}.log"), prints)
        break
    assert os.wait()[1] == 0
"""
"""Writes with each value of `Prints`, each in a process of its own: torch is imported once."""


PRINTED = (b"a 1b\n", b"\xff\n\xfe \\ud800\n", b"from a child\nno end|after")
DRAWN = (b"\r  0%|\r 50%|\r100%|\n", b"\\ud800\n")
IN_ORDER = PRINTED[0] + DRAWN[0] + PRINTED[1] + DRAWN[1] + PRINTED[2]
LOGGED = b"first\na 1b\n100%|\n\\udcff\n\\udcfe \\ud800\n\\ud800\n"


EXPECTED = {
    Prints.STDOUT: (b"".join(PRINTED), b"".join(DRAWN), LOGGED + b"no end\n"),
    Prints.STDERR: (b"", IN_ORDER, LOGGED + b"no end\n"),
    Prints.LOG: (b"", b"".join(DRAWN), LOGGED + b"from a child\nno end\n|after"),
}


@pytest.mark.timeout(600)
def test_standard_streams_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    for prints in Prints:
        (tmp_path / f"{prints.value}.log").write_text("first\n")
    argv = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {
        prints: tuple(
            (tmp_path / f"{prints.value}.{name}").read_bytes() for name in ("out", "err", "log")
        )
        for prints in Prints
    } == EXPECTED


def stream_to(log: ScriptLog, descriptor: int | None) -> io.TextIOWrapper:
    return io.TextIOWrapper(ScriptStream(log, descriptor), "utf-8", line_buffering=True)


def test_a_full_disk_costs_lines_and_not_the_script(caplog: pytest.LogCaptureFixture) -> None:
    log = ScriptLog(Path("/dev/full"))
    read_fd, write_fd = os.pipe()
    try:
        print("a", file=stream_to(log, write_fd))
        print("b", file=stream_to(log, write_fd))
        assert os.read(read_fd, 100) == b"a\nb\n"
    finally:
        log.close()
        os.close(read_fd)
        os.close(write_fd)
    (warning,) = caplog.messages
    assert warning.startswith(
        "the script's output cannot be written to its log: No space left on device"
    )


def test_after_the_launcher_has_gone_the_log_has_the_output(tmp_path: Path) -> None:
    log = ScriptLog(tmp_path / "log")
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    try:
        print("a", file=stream_to(log, write_fd))
    finally:
        log.close()
        os.close(write_fd)
    assert (tmp_path / "log").read_text() == "a\n"


def test_what_a_thread_writes_after_the_end_of_its_script_is_dropped(tmp_path: Path) -> None:
    log = ScriptLog(tmp_path / "log")
    with stream_to(log, None) as stream:
        print("first", file=stream)
        log.close()
        print("late", file=stream)
    assert (tmp_path / "log").read_text() == "first\n"
