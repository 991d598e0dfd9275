"""Background writes: one at a time, in order, and the last failure is raised."""

from __future__ import annotations

import logging
import threading

import pytest

from poseidon.engine.snapshots.writer import SnapshotWriter
from poseidon.errors import SnapshotError


def fail() -> None:
    raise SnapshotError("the disk is full")


def test_submit_returns_while_the_write_is_under_way() -> None:
    writer, go, written = SnapshotWriter(), threading.Event(), list[int]()

    def write() -> None:
        assert go.wait(30)
        written.append(1)

    writer.submit(write)
    assert written == []
    go.set()
    writer.wait()
    assert written == [1]


def test_writes_keep_their_order() -> None:
    writer, written = SnapshotWriter(), list[int]()
    for number in range(20):
        writer.submit(lambda number=number: written.append(number))
    writer.wait()
    assert written == list(range(20))


def test_the_last_failure_is_raised_once_and_each_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = SnapshotWriter()
    with caplog.at_level(logging.WARNING):
        writer.submit(fail)
        with pytest.raises(SnapshotError, match="the disk is full"):
            writer.wait()
    assert "the disk is full; training continues" in caplog.text
    writer.wait()


def test_the_warning_of_a_runs_last_write_says_that_the_job_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = SnapshotWriter()
    writer.submit(fail, last=True)
    with pytest.raises(SnapshotError, match="the disk is full"):
        writer.wait()
    assert "the disk is full; it is the run's last, so the job fails" in caplog.text
    assert "training continues" not in caplog.text


def test_a_later_success_clears_an_earlier_failure() -> None:
    writer = SnapshotWriter()
    writer.submit(fail)
    writer.submit(lambda: None)
    writer.wait()


def test_an_unexpected_exception_is_an_error() -> None:
    writer = SnapshotWriter()
    writer.submit(lambda: print(1 / 0))
    with pytest.raises(
        SnapshotError, match=r"could not be written: ZeroDivisionError: division by zero"
    ):
        writer.wait()
