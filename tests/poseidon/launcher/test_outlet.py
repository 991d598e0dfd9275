"""A terminal or a pipe that takes nothing holds nobody."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TextIO

import pytest

from poseidon.launcher.outlet import MOST_HELD, Outlet, may_wait

LINE = "x" * 99 + "\n"
Made = tuple[TextIO, Callable[[int], str]]


@pytest.fixture
def pipe() -> Iterator[Made]:
    ours, theirs = os.pipe()
    yield from stream_of(ours, theirs)


@pytest.fixture
def terminal() -> Iterator[Made]:
    ours, theirs = os.openpty()
    os.set_blocking(theirs, True)
    yield from stream_of(ours, theirs)


def stream_of(ours: int, theirs: int) -> Iterator[Made]:
    """Yield the stream, and a function that reads so many characters of it."""

    def read(count: int) -> str:
        text = ""
        while len(text) < count:
            text += os.read(ours, 65536).decode().replace("\r", "")
        return text

    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        yield stream, read
        with suppress(OSError):
            os.close(ours)


def test_what_may_wait(pipe: Made, terminal: Made, tmp_path: Path) -> None:
    assert may_wait(pipe[0])
    assert may_wait(terminal[0])
    assert not may_wait(io.StringIO())
    with (tmp_path / "log").open("w") as file:
        assert not may_wait(file)


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_stream_that_takes_nothing_holds_nobody(
    kind: str, request: pytest.FixtureRequest
) -> None:
    stream, read = request.getfixturevalue(kind)
    outlet = Outlet(stream, lambda: False)
    text = "".join(f"{number}\n" for number in range(90_000))  # more than the system takes
    assert len(text) < MOST_HELD
    for line in text.splitlines(keepends=True):
        assert outlet.write(line) == len(line)
    assert read(len(text)) == text
    outlet.close()
    outlet.write("after\n")
    assert read(6) == "after\n"
    outlet.close()


def test_a_terminal_that_is_paused_for_long_loses_lines_and_says_so(terminal: Made) -> None:
    stream, read = terminal
    outlet = Outlet(stream, lambda: False)
    count = 3 * MOST_HELD // len(LINE)
    for _ in range(count):
        outlet.write(LINE)
    reader = threading.Thread(target=outlet.close)
    reader.start()
    text = ""
    while "the logs have them" not in text:
        text += read(1)
    reader.join(60)
    shown = text.count(LINE)
    assert f"\n... {count - shown:,} lines are left out: the terminal was paused;" in text
    assert MOST_HELD <= shown * len(LINE) < 2 * MOST_HELD


def test_the_writer_of_a_pipe_waits_unless_it_is_in_a_hurry(pipe: Made) -> None:
    stream, read = pipe
    asked = threading.Event()
    outlet = Outlet(stream, asked.is_set)
    count = 3 * MOST_HELD // len(LINE)
    written = threading.Thread(target=lambda: [outlet.write(LINE) for _ in range(count)])
    written.start()
    with outlet._changed:
        assert outlet._changed.wait_for(lambda: len(outlet._waiting) >= MOST_HELD, 60)
    assert written.is_alive()
    asked.set()
    written.join(60)
    assert not written.is_alive()
    assert read(count * len(LINE)) == count * LINE
    outlet.close()


def test_a_reader_that_has_gone_is_an_error() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as stream:
        outlet = Outlet(stream, lambda: False)
        outlet.write("x")
        with pytest.raises(BrokenPipeError):
            outlet.close()
        with pytest.raises(BrokenPipeError):
            outlet.write("x")


def test_ctrl_c_ends_the_waiting_for_a_reader(pipe: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, read = pipe
    outlet = Outlet(stream, lambda: False)
    outlet.write(LINE * 5000)

    def interrupt(_: float) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(outlet._changed, "wait", interrupt)
        outlet.close()
    outlet.write("after")  # nothing waits for it
    with closing(stream):
        assert read(len(LINE) * 5000) == LINE * 5000
