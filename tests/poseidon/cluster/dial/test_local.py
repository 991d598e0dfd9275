"""The agent in this process."""

from __future__ import annotations

import time

import pytest

from poseidon.cluster.agent import host
from poseidon.cluster.agent.silence import Silence
from poseidon.cluster.dial.local import dial_here


def test_silence_does_not_end_it() -> None:
    """All its threads may wait for processors, as long as it takes."""
    agent = dial_here()
    try:
        agent._silence = Silence(3600.0, time.monotonic() - 3600.0)
        assert agent._why_lost() == ""
    finally:
        agent.close()


def test_the_end_of_its_thread_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host.Agent, "_end_job", fail)
    agent = dial_here()
    try:
        agent.end_all()
        assert "No space left" in (agent.lost or "")
    finally:
        agent.close()
