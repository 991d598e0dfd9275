"""Liveness of processes. A zombie is not alive: it only waits for its parent to read its status."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


def live_pids(pids: Iterable[int]) -> list[int]:
    """Return the pids of processes that run or are stopped."""
    return [pid for pid in pids if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def none_left(pids: Iterable[int], timeout_s: float = 10.0) -> bool:
    """Return True if all processes end within a time; the kernel takes a moment to carry out a
    kill.
    """
    end_s = time.monotonic() + timeout_s
    left = live_pids(pids)
    while left and time.monotonic() < end_s:
        time.sleep(0.005)
        left = live_pids(left)
    return not left
