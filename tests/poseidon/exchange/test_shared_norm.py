"""The norm that carriers share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from poseidon.exchange.shared_norm import SharedNorm


class Server:
    """Has the total of a clock once all carriers have added to it; each is taken once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sums: dict[int, float] = {}
        self.waits = threading.Semaphore(0)

    def add_norm(self, clock: int, squares: list[float]) -> None:
        with self._changed:
            self._sums[clock] = sum(squares)
            self._changed.notify_all()

    def total_norm(self, clock: int) -> float:
        if clock < 0:
            raise ValueError(clock)
        self.waits.release()
        with self._changed:
            assert self._changed.wait_for(lambda: clock in self._sums, 60)
            return self._sums.pop(clock)


def norm_of(server: Any) -> SharedNorm:
    return SharedNorm(server, ["factors", "all-reduce"])


def test_a_carrier_that_is_ahead_does_not_hold_the_other_one() -> None:
    """It waits for a clock to which the other one adds only after the clock before."""
    server = Server()
    norm = norm_of(server)
    norm.add("factors", 0, [1.0])
    norm.add("all-reduce", 0, [2.0, 3.0])
    assert norm.total(0) == 6.0
    norm.add("factors", 1, [4.0])
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(norm.total, 1)
        for _ in range(2):
            assert server.waits.acquire(timeout=60)
        assert norm.total(0) == 6.0
        norm.add("all-reduce", 1, [5.0])
        assert norm.total(1) == 9.0
        assert ahead.result(60) == 9.0


def test_an_error_ends_the_waits_of_both() -> None:
    norm = norm_of(Server())
    for _ in range(2):
        with pytest.raises(ValueError, match="-1"):
            norm.total(-1)
