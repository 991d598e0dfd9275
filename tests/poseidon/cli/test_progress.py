"""The bar: drawn on a terminal, nothing elsewhere."""

from __future__ import annotations

import io
import sys

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
