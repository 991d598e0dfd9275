"""Threads that call a function in a loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from poseidon.caffe2 import parallel_workers


@pytest.fixture
def coordinator() -> Iterator[parallel_workers.GlobalWorkerCoordinator]:
    """Yield the global coordinator; its threads end with the test."""
    yield parallel_workers.global_coordinator
    assert parallel_workers.global_coordinator.stop()


class TestInitWorkers:
    def test_each_thread_calls_the_function_with_its_own_number(self, coordinator: Any) -> None:
        calls: queue.Queue[int] = queue.Queue()
        both = threading.Barrier(2)

        def work(number: int) -> None:
            both.wait(30)
            calls.put(number)

        before = len(coordinator.get_worker_ids())
        given = parallel_workers.init_workers(work, shutdown_fun=both.abort)
        given.start()
        numbers = {calls.get(timeout=30) for _ in range(2)}
        assert given is coordinator
        assert numbers == {before, before + 1}

    def test_init_comes_before_the_first_call_and_shutdown_at_the_end(
        self, coordinator: Any
    ) -> None:
        order: list[str] = []
        called = threading.Event()

        def work(number: int) -> None:
            if not called.is_set():
                order.append("work")
                called.set()

        parallel_workers.init_workers(
            work,
            num_worker_threads=1,
            init_fun=lambda own, everything: order.append(f"init {own.is_active()}"),
            shutdown_fun=lambda: order.append("shutdown"),
        )
        coordinator.start()
        coordinator.start()
        assert called.wait(30)
        assert coordinator.stop()
        assert order == ["init True", "work", "shutdown"]

    def test_shutdown_is_not_called_where_nothing_started(self, coordinator: Any) -> None:
        calls: list[str] = []
        parallel_workers.init_workers(lambda n: None, shutdown_fun=lambda: calls.append("shutdown"))
        assert coordinator.stop()
        assert calls == []

    def test_an_error_ends_the_threads_of_its_coordinator(
        self, coordinator: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        ended = threading.Event()

        def work(number: int) -> None:
            raise ValueError("no more input")

        parallel_workers.init_workers(work, num_worker_threads=1, shutdown_fun=ended.set)
        coordinator.start()
        assert ended.wait(30)
        assert coordinator.stop()
        assert "no more input" in caplog.text

    def test_only_the_named_threads_stop(self, coordinator: Any) -> None:
        calls: queue.Queue[str] = queue.Queue(1)
        stopped: list[str] = []
        for name in ("train", "test"):
            parallel_workers.init_workers(
                lambda number, name=name: _offer(calls, name),
                1,
                name,
                shutdown_fun=lambda name=name: stopped.append(name),
            )
        coordinator.start()
        assert coordinator.stop_coordinator("train")
        assert stopped == ["train"]
        while calls.get(timeout=30) != "test":
            pass
        assert calls.get(timeout=30) == "test"

    def test_loggers_get_the_sums(self, coordinator: Any) -> None:
        logged: queue.Queue[dict[str, float]] = queue.Queue()

        class Logger:
            def log(self, metrics: dict[str, float]) -> None:
                logged.put(metrics)

        parallel_workers.init_workers(lambda number: None, 1, external_loggers=[Logger()])
        coordinator.start()
        assert logged.get(timeout=30)["worker_time_count"] == 1
        assert logged.get(timeout=30)["worker_time_count"] == 2


def _offer(calls: queue.Queue[str], name: str) -> None:
    try:
        calls.put_nowait(name)
    except queue.Full:
        threading.Event().wait(0.001)
