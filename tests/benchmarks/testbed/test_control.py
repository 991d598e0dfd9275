"""Rounds over the control socket, with threads as workers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.testbed.control import HIGHEST_PRIORITY, Workers, serve_rounds
from benchmarks.testbed.errors import TestbedError

LIMIT_S = 20.0


def nothing() -> None:
    """A barrier, a look at living processes."""


def noted(done: list[tuple[str, int]], rank: int) -> float:
    """An iteration whose loss is its number."""
    done.append(("iteration", rank))
    return float(done.count(("iteration", rank)))


@contextmanager
def worker(
    path: Path,
    rank: int,
    iterate: Callable[[], float],
    barrier: Callable[[], None],
    *,
    steady: bool = False,
) -> Iterator[None]:
    thread = threading.Thread(
        target=serve_rounds, args=(path, rank, iterate, barrier), kwargs={"steady": steady}
    )
    thread.start()
    yield
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_all_workers_run_each_round_and_end_with_the_measuring_side(tmp_path: Path) -> None:
    done: list[tuple[str, int]] = []
    path = tmp_path / "control"
    with (
        Workers(path, 2) as workers,
        worker(path, 1, lambda: noted(done, 1), lambda: done.append(("barrier", 1))),
        worker(path, 0, lambda: noted(done, 0), lambda: done.append(("barrier", 0))),
    ):
        workers.await_all(LIMIT_S, nothing)
        for iterations in (3, 1):
            done.clear()
            rounds = workers.round(iterations)
            for each in rounds:
                assert len(each.seconds) == len(each.user_s) == len(each.system_s) == iterations
                assert each.losses == tuple(range(1, iterations + 1))
                assert min(*each.seconds, *each.user_s, *each.system_s) >= 0
            for rank in (0, 1):
                own = [what for what, who in done if who == rank]
                assert own == ["barrier", *["iteration"] * iterations]
        workers.close()


def test_missing_workers_are_counted(tmp_path: Path) -> None:
    with (
        Workers(tmp_path / "control", 2) as workers,
        pytest.raises(TestbedError, match="only 0 of 2 workers"),
    ):
        workers.await_all(0.0, nothing)


def test_a_dead_process_ends_the_wait(tmp_path: Path) -> None:
    def dead() -> None:
        raise TestbedError("DDP worker 1 failed with status 3")

    with Workers(tmp_path / "control", 1) as workers, pytest.raises(TestbedError, match="status 3"):
        workers.await_all(LIMIT_S, dead)


def test_a_worker_that_goes_in_a_round_is_named(tmp_path: Path) -> None:
    path = tmp_path / "control"

    class Gone(Exception):
        pass

    def go() -> float:
        raise Gone

    def run() -> None:
        with pytest.raises(Gone):
            serve_rounds(path, 0, go, nothing)

    thread = threading.Thread(target=run)
    with Workers(path, 1) as workers:
        thread.start()
        workers.await_all(LIMIT_S, nothing)
        with pytest.raises(TestbedError, match="worker 0 is gone"):
            workers.round(1)
    thread.join(LIMIT_S)


@pytest.mark.needs("root")
def test_a_steady_worker_goes_first_from_its_second_round_on_and_what_it_started_does_not(
    tmp_path: Path,
) -> None:
    levels: list[tuple[int, int]] = []
    started = threading.Event()
    done = threading.Event()
    others: list[threading.Thread] = []

    def helper() -> None:
        others.append(threading.current_thread())
        started.set()
        done.wait(LIMIT_S)

    def iterate() -> float:
        if not others:
            threading.Thread(target=helper).start()
            assert started.wait(LIMIT_S)
        helper_id = others[0].native_id
        assert helper_id is not None
        own, other = (
            os.getpriority(os.PRIO_PROCESS, each) for each in (threading.get_native_id(), helper_id)
        )
        levels.append((own, other))
        return 0.0

    path = tmp_path / "control"
    with Workers(path, 1) as workers, worker(path, 0, iterate, nothing, steady=True):
        workers.await_all(LIMIT_S, nothing)
        before = os.getpriority(os.PRIO_PROCESS, 0)
        workers.round(1)
        workers.round(1)
        workers.close()
        done.set()
    assert levels == [(before, before), (HIGHEST_PRIORITY, before)]
