"""The watchdog ends a process that hangs, and leaves the others alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from poseidon.caffe2 import timeout_guard

HANGS = """
import signal, threading
from poseidon.caffe2 import timeout_guard
signal.signal(signal.SIGINT, signal.default_int_handler)
timeout_guard.ABORT_S = 600.0
with timeout_guard.CompleteInTimeOrDie(0.05):
    threading.Event().wait()
"""
DEAF = """
import signal, threading
from poseidon.caffe2 import timeout_guard
signal.signal(signal.SIGINT, lambda *_: None)
timeout_guard.ABORT_S = 0.05
timeout_guard.EuthanizeIfNecessary(0.05)
threading.Event().wait()
"""


IGNORES = HANGS.replace("signal.default_int_handler", "signal.SIG_IGN")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "codes"), [(HANGS, {-2, 130, 1}), (DEAF, {-6}), (IGNORES, {-6})]
)
def test_a_process_that_hangs_ends_with_its_stacks(script: str, codes: set[int]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode in codes
    assert "in time. Timeout:0.05s PID: " in done.stderr
    assert "most recent call first" in done.stderr


def test_a_call_in_time_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr(timeout_guard, "_end_process", ended.append)
    with pytest.raises(ValueError, match="own"), timeout_guard.CompleteInTimeOrDie(1000):
        raise ValueError("own")
    assert not ended
