"""What a script prints."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from poseidon.engine.module.prints import Prints


def test_lines_go_whole_to_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = (io.StringIO(), io.StringIO())
    prints = Prints(streams)
    monkeypatch.setattr(sys, "stdout", prints)
    print("a", 1, end="")
    assert streams[0].getvalue() == ""
    print("b\nc", end="")
    assert streams[1].getvalue() == "a 1b\n"
    prints.flush()
    assert [stream.getvalue() for stream in streams] == ["a 1b\nc"] * 2
    prints.close()
    assert not streams[0].closed


def test_a_disk_that_is_full_costs_lines_and_not_the_script(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = io.StringIO()
    full = Path("/dev/full").open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closing it fails
    monkeypatch.setattr(sys, "stdout", Prints((full, terminal)))
    print("a")
    print("b")
    assert terminal.getvalue() == "a\nb\n"
    (told,) = caplog.messages
    assert told.startswith("what the script prints cannot be kept in its log: No space left on device")
    with pytest.raises(OSError, match="No space"):
        full.close()
