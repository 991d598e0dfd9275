"""The bar: drawn on a terminal, nothing elsewhere."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import sys
import termios

import pytest

from poseidon.cli.progress import progress_bar
from poseidon.data.progress import DOWNLOADING


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def draw(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_bar() as report:
        report(DOWNLOADING, 1024, 2048)
        report(DOWNLOADING, 2048, 2048)
        for done in range(1, 6):
            report("writing", done, 5)
    return screen.getvalue()


def test_on_a_terminal_each_activity_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw(Terminal(), monkeypatch)
    assert "downloading: 100%" in drawn
    assert "2.00k/2.00k" in drawn
    assert "writing: 100%" in drawn
    assert "5/5" in drawn


def test_elsewhere_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert draw(io.StringIO(), monkeypatch) == ""


def test_a_terminal_without_a_width_has_a_bar_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pseudo-terminal of a container has 0 columns until somebody says otherwise."""
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    with os.fdopen(follower, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        with progress_bar() as report:
            report("writing", 5, 5)
        screen.flush()
        drawn = ""
        while "writing: 100%" not in drawn:  # a read returns what the terminal has passed on so far
            drawn += os.read(leader, 1 << 16).decode()
    os.close(leader)
