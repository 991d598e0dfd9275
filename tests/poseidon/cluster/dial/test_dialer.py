"""Agents are closed side by side: one that fails, or ends late, keeps nobody else."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from poseidon.cluster.agent import host
from poseidon.cluster.agent.messages import PeerSilence
from poseidon.cluster.dial import dialer
from poseidon.cluster.dial.dialer import close_agents, dial_here


class Closable:
    """Counts its ends; may fail, or end late."""

    label = "ml@node1"

    def __init__(
        self, error: Exception | None = None, goes_on: threading.Event | None = None
    ) -> None:
        self.closed = threading.Event()
        self._error = error
        self._goes_on = goes_on

    def close(self) -> None:
        self.closed.set()
        if self._error is not None:
            raise self._error
        if self._goes_on is not None:
            self._goes_on.wait(30)


def test_closing_one_that_fails_closes_the_others_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    every: Any = [Closable(), Closable(ValueError("a bad answer")), Closable()]
    close_agents(every)
    assert all(one.closed.is_set() for one in every)
    assert caplog.messages == [
        "ml@node1: closing the connection failed: ValueError('a bad answer')"
    ]


def test_closing_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialer, "CLOSE_S", 0.01)
    goes_on = threading.Event()
    late: Any = [Closable(goes_on=goes_on)]
    close_agents(late)
    goes_on.set()


def test_silence_does_not_end_it() -> None:
    """All its threads may wait for processors, as long as it takes."""
    agent = dial_here()
    try:
        agent._hearing._silence = PeerSilence(3600.0, time.monotonic() - 3600.0)
        assert agent._hearing.why_lost() == ""
    finally:
        agent.close()


def test_the_end_of_its_thread_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host.Agent, "_end_job", fail)
    agent = dial_here()
    try:
        agent.end_all()
        assert "No space left" in str(agent.lost)
    finally:
        agent.close()
