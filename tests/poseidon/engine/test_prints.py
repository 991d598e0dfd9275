"""What a script prints."""

from __future__ import annotations

import io
import sys

import pytest

from poseidon.engine.prints import Prints


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
