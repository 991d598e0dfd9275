"""Threads of Python that call a function again and again, e.g. to fill the queues of a net.

    coordinator = init_workers(work, worker_name="train")
    coordinator.start()
    ...
    coordinator.stop()

`work(worker_id)` is called in a loop by each thread until `stop`.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

log = logging.getLogger("parallel_workers")

STOP_LIMIT_S = 5.0
"""Seconds that `stop` waits for each thread, which may wait for input."""


class Metrics:
    """Sums and counts of what the threads measure, given to loggers after each call."""

    def __init__(self, external_loggers: Iterable[Any] | None) -> None:
        """Make empty metrics.

        Args:
            external_loggers: objects with a method `log(metrics)`.
        """
        self._external_loggers = list(external_loggers or ())
        self._metrics: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def reset_metrics(self) -> None:
        with self._lock:
            self._metrics.clear()

    def put_metric(self, key: str, value: float, count: bool = True) -> None:
        """Add a value to a sum, and 1 to `<key>_count` where `count` is set."""
        with self._lock:
            self._metrics[key] += value
            if count:
                self._metrics[f"{key}_count"] += 1

    def log_metrics(self) -> None:
        """Give the values to the loggers; the failure of one is logged."""
        with self._lock:
            metrics = dict(self._metrics)
        for logger in self._external_loggers:
            try:
                logger.log(metrics)
            except Exception:
                log.exception("A logger of metrics has failed")


class State:
    """The base of what the threads of one coordinator share."""

    def start(self) -> None:
        """Prepare for the threads, which start next."""

    def stop(self) -> None:
        """End what the threads may wait for."""

    def cleanup(self) -> None:
        """Release memory; all threads have ended."""


class WorkerCoordinator:
    """The threads of one function."""

    stop_limit_s = STOP_LIMIT_S

    def __init__(
        self,
        worker_name: str,
        worker_ids: Sequence[int],
        init_fun: Callable[[Any, Any], Any] | None,
        state: State | None = None,
        shutdown_fun: Callable[[], Any] | None = None,
    ) -> None:
        """Describe the threads; `_workers` gets them.

        Args:
            worker_name: the name for `stop_coordinator`.
            worker_ids: the numbers of the threads.
            init_fun: called with this and the global coordinator before the threads start.
            state: what the threads share.
            shutdown_fun: called once when started threads are to stop.
        """
        self._worker_name = worker_name
        self._worker_ids = list(worker_ids)
        self._init_fun = init_fun
        self._state = state
        self._shutdown_fun = shutdown_fun
        self._workers: list[threading.Thread] = []
        self._active = True
        self._started = False

    def is_active(self) -> bool:
        return self._active

    def get_worker_ids(self) -> list[int]:
        return self._worker_ids

    def init(self, global_coordinator: GlobalWorkerCoordinator) -> None:
        """Call the init function where the threads are not started."""
        if self._init_fun is not None and not self._started:
            self._init_fun(self, global_coordinator)

    def start(self) -> None:
        if self._started:
            return
        self._active = self._started = True
        if self._state is not None:
            self._state.start()
        for worker in self._workers:
            worker.start()

    def request_stop(self, reason: str | None = None) -> None:
        """Let the threads end after their current call.

        Args:
            reason: the error that ends them; it is logged.
        """
        self._active = False
        if reason is not None:
            log.error("Data input failed due to an error: %s", reason)
        started, self._started = self._started, False
        if started and self._shutdown_fun is not None:
            self._shutdown_fun()
        if self._state is not None:
            self._state.stop()

    def wait(self) -> bool:
        """Wait for the threads, within a limit; return whether all have ended."""
        others = [
            each for each in self._workers if each.ident and each is not threading.current_thread()
        ]
        for worker in others:
            worker.join(self.stop_limit_s)
        alive = [worker.name for worker in others if worker.is_alive()]
        if alive:
            log.warning(
                "%d workers of %s have not ended: %s",
                len(alive),
                self._worker_name,
                ", ".join(alive),
            )
        elif self._state is not None:
            self._state.cleanup()
        return not alive


class GlobalWorkerCoordinator:
    """All coordinators of the process."""

    def __init__(self) -> None:
        self._coordinators: list[WorkerCoordinator] = []
        self._worker_ids: list[int] = []

    def add(self, coordinator: WorkerCoordinator) -> None:
        self._coordinators.append(coordinator)

    def get_new_worker_id(self) -> int:
        self._worker_ids.append(len(self._worker_ids))
        return self._worker_ids[-1]

    def get_worker_ids(self) -> list[int]:
        return self._worker_ids

    def start(self) -> None:
        """Call all init functions, one after the other, then start the threads."""
        for coordinator in self._coordinators:
            coordinator.init(self)
        for coordinator in self._coordinators:
            coordinator.start()

    def stop(self) -> bool:
        """Stop all threads and forget them; return whether all have ended."""
        coordinators, self._coordinators = self._coordinators, []
        return _stop(coordinators)

    def stop_coordinator(self, worker_name: str) -> bool:
        """Stop the threads of one name and forget them; return whether they have ended."""
        ours = [each for each in self._coordinators if each._worker_name == worker_name]
        self._coordinators = [each for each in self._coordinators if each not in ours]
        return _stop(ours)


def _stop(coordinators: Sequence[WorkerCoordinator]) -> bool:
    for coordinator in coordinators:
        coordinator.request_stop()
    ended = [coordinator.wait() for coordinator in coordinators]
    return all(ended)


global_coordinator = GlobalWorkerCoordinator()
atexit.register(global_coordinator.stop)


def init_workers(
    worker_fun: Callable[[int], Any],
    num_worker_threads: int = 2,
    worker_name: str = "train",
    init_fun: Callable[[Any, Any], Any] | None = None,
    external_loggers: Iterable[Any] | None = None,
    shutdown_fun: Callable[[], Any] | None = None,
) -> GlobalWorkerCoordinator:
    """Make threads that call a function in a loop; `start` of what is returned starts them.

    Args:
        worker_fun: called with the thread's number. Its error ends all threads of the coordinator.
        num_worker_threads: the number of threads.
        worker_name: the name for `stop_coordinator`.
        init_fun: called with the coordinator and the global one, once, before the threads start.
        external_loggers: objects with a method `log(metrics)`.
        shutdown_fun: called when the threads are to stop.

    Returns:
        the coordinator of all threads of the process.
    """
    metrics = Metrics(external_loggers)
    numbers = [global_coordinator.get_new_worker_id() for _ in range(num_worker_threads)]
    coordinator = WorkerCoordinator(worker_name, numbers, init_fun, shutdown_fun=shutdown_fun)
    coordinator._workers = [
        threading.Thread(
            target=_run,
            args=(coordinator, number, worker_fun, metrics),
            daemon=True,
            name=f"parallel_workers worker id {number}",
        )
        for number in numbers
    ]
    global_coordinator.add(coordinator)
    return global_coordinator


def _run(
    coordinator: WorkerCoordinator, number: int, worker_fun: Callable[[int], Any], metrics: Metrics
) -> None:
    while coordinator.is_active():
        start_s = time.monotonic()
        try:
            worker_fun(number)
        except Exception as error:
            log.exception("Exception in worker %d", number)
            coordinator.request_stop(f"Exception in worker {number}: {error}")
        metrics.put_metric("worker_time", time.monotonic() - start_s)
        metrics.log_metrics()
