"""What a debugger in a worker does to the job."""

from __future__ import annotations

import pdb
from bdb import BdbQuit
from typing import Any

import pytest

from poseidon.engine.heartbeat import Watchdog
from poseidon.engine.this_process import ENDED, NO_DEBUGGER, ending, refuse_breakpoints, unwatched
from poseidon.errors import UsageError


def test_a_loop_in_a_debugger_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    watchdog = Watchdog(now=lambda: now)
    still: list[float] = []

    def interaction(debugger: pdb.Pdb, frame: Any, trace: Any) -> None:
        nonlocal now
        now += 1000.0
        still.append(watchdog.read().still_s)

    monkeypatch.setattr(pdb.Pdb, "interaction", interaction)
    with unwatched(watchdog):
        pdb.Pdb().interaction(None, None)  # before the loop
        watchdog.start()
        now += 5.0
        pdb.Pdb().interaction(None, None)
        now += 7.0
        assert watchdog.read().still_s == 7.0
    assert still == [0.0, 0.0]
    assert pdb.Pdb.interaction is interaction


def test_the_end_of_a_debugger_is_told_whatever_follows_from_it() -> None:
    try:
        try:
            raise BdbQuit
        except BdbQuit as quits:
            raise ValueError("layer 'x': BdbQuit") from quits
    except ValueError as error:
        ends = [ending(error, workers) for workers in (1, 2)]
        assert [str(one) for one in ends] == [ENDED, NO_DEBUGGER]
        assert all(one is not None and one.__traceback__ is error.__traceback__ for one in ends)
    assert ending(ValueError("x"), 1) is None


def test_a_breakpoint_that_has_nothing_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.breakpointhook", None)
    refuse_breakpoints()
    with pytest.raises(UsageError, match="use --workers=1"):
        breakpoint()
