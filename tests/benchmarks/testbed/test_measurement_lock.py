"""One measurement at a time."""

from __future__ import annotations

import threading
from pathlib import Path

from benchmarks.testbed.measurement_lock import alone


def nobody_waits(words: str) -> None:
    raise AssertionError(words)


def test_a_second_measurement_waits_for_the_first(tmp_path: Path) -> None:
    lock, order = tmp_path / "lock", []
    waiting = threading.Event()

    def report(words: str) -> None:
        order.append("waits")
        assert str(lock) in words
        waiting.set()

    def second() -> None:
        with alone(report, lock):
            order.append("second")

    thread = threading.Thread(target=second)
    with alone(nobody_waits, lock):
        thread.start()
        assert waiting.wait(20)
        order.append("first ends")
    thread.join(20)
    assert order == ["waits", "first ends", "second"]


def test_a_file_left_behind_stops_nobody(tmp_path: Path) -> None:
    for _ in range(2):
        with alone(nobody_waits, tmp_path / "lock"):
            pass
