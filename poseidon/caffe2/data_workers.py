"""Threads of Python that fetch batches for a net: it takes them from queues of the workspace.

    coordinator = init_data_input_workers(model, ["data", "label"], fetch, 32,
    input_source_name="train") coordinator.start()

`fetch(worker_id, batch_size)` returns an array for each blob; rows are cut into batches.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from poseidon.caffe2 import core, parallel_workers, scope, workspace
from poseidon.caffe2.operators.system.queues import BlobsQueue
from poseidon.caffe2.runtime.bind import device_of
from poseidon.caffe2.runtime.values import to_value
from poseidon.caffe2.workspace.current import current

log = logging.getLogger("data_workers")

STOP_LIMIT_S = 10.0


def get_worker_ids(num_workers: int) -> list[int]:
    """Return the numbers of the workers of a source: from 0."""
    return list(range(num_workers))


class State(parallel_workers.State):
    """What the threads of a source share.

    Attributes:
        _inputs: the number of fetched inputs.
        error: what a fetcher has raised.
    """

    def __init__(self, queue: BlobsQueue) -> None:
        self._inputs = 0
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._queue = queue

    def count(self) -> None:
        with self._lock:
            self._inputs += 1

    def stop(self) -> None:
        self._queue.close()


class WorkerCoordinator(parallel_workers.WorkerCoordinator):
    """The threads of one source, and its queue."""

    _state: State
    stop_limit_s = STOP_LIMIT_S

    def __init__(
        self, name: str, queue: BlobsQueue, fetchers: Sequence[Callable[[], None]]
    ) -> None:
        super().__init__(name, range(len(fetchers)), None, State(queue))
        self._queue = queue
        self._workers = [
            threading.Thread(
                target=self._guarded, args=(fetch,), daemon=True, name=f"data_workers {name}"
            )
            for fetch in fetchers
        ]

    def is_active(self) -> bool:
        return not self._queue.closed

    def _guarded(self, fetch: Callable[[], None]) -> None:
        try:
            fetch()
        except BaseException as error:
            log.exception("A fetcher of the source %s has failed", self._worker_name)
            self._state.error = error
            self._queue.close()


class GlobalWorkerCoordinator(parallel_workers.GlobalWorkerCoordinator):
    """All sources of the process."""

    def __init__(self) -> None:
        super().__init__()
        self._fetcher_id_seq = 0

    def get_new_fetcher_id(self) -> int:
        """Return a number that no other thread has."""
        self._fetcher_id_seq += 1
        return self._fetcher_id_seq - 1

    def stop_coordinator(self, input_source: str) -> bool:
        """Stop a source and forget it; return whether its threads have ended."""
        return super().stop_coordinator(input_source)


global_coordinator = GlobalWorkerCoordinator()
atexit.register(global_coordinator.stop)  # a thread inside torch would abort the process


class _Batches:
    """Cuts what fetchers give into batches; used by several threads."""

    def __init__(self, size: int, columns: Sequence[int], rebatch: bool) -> None:
        self._size, self._columns, self._rebatch = size, columns, rebatch
        self._parts: list[np.ndarray] = []
        self._lock = threading.Lock()

    def add(self, arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Add arrays; return the batches that are full now.

        Raises:
            ValueError: the arrays have different numbers of rows.
        """
        if not self._rebatch:
            return [list(arrays)]
        rows = {array.shape[axis] for array, axis in zip(arrays, self._columns, strict=True)}
        if len(rows) != 1:
            raise ValueError(f"a fetcher gave arrays of {sorted(rows)} rows: expected one number")
        with self._lock:
            joined = [
                np.concatenate(pair, axis=axis)
                for pair, axis in zip(
                    zip(self._parts, arrays, strict=True)
                    if self._parts
                    else ((a,) for a in arrays),
                    self._columns,
                    strict=True,
                )
            ]
            count = joined[0].shape[self._columns[0]] // self._size
            cuts = [self._size * index for index in range(1, count + 1)]
            split = [
                np.split(array, cuts, axis)
                for array, axis in zip(joined, self._columns, strict=True)
            ]
            self._parts = [parts[-1] for parts in split]
            return [list(batch) for batch in zip(*(parts[:-1] for parts in split), strict=True)]


def init_data_input_workers(
    net: Any,
    input_blob_names: Sequence[str],
    fetch_fun: Callable[[int, int], Sequence[np.ndarray] | None],
    batch_size: int,
    num_worker_threads: int = 2,
    input_source_name: str = "train",
    max_buffered_batches: int = 800,
    init_fun: Callable[[Any, Any], None] | None = None,
    external_loggers: Any = None,
    dont_rebatch: bool = False,
    batch_columns: Sequence[int | None] | None = None,
    timeout: float = 600,
) -> GlobalWorkerCoordinator:
    """Add what takes batches from a queue to a net, and make (not start) the threads that fill it.

    Args:
        net: a net or a model.
        input_blob_names: the blobs of a batch.
        fetch_fun: see the module; None or an empty result means that there is no input.
        batch_size: rows of a batch.
        num_worker_threads: the number of threads.
        input_source_name: names the source, and its queue.
        max_buffered_batches: the length of the queue.
        init_fun: is called by each thread first, with its number and the coordinator.
        external_loggers: accepted, without effect.
        dont_rebatch: whether each result of `fetch_fun` is a batch as it is.
        batch_columns: the dimension of the rows of each blob; by default the first.
        timeout: seconds that the net waits for a batch.

    Returns:
        the coordinator of all sources.
    """
    device = scope.CurrentDeviceScope() or core.DeviceOption(0)
    name = f"{scope.CurrentNameScope()}{input_source_name}_queue"
    queue = BlobsQueue(max_buffered_batches, len(input_blob_names))
    current().create(name).value = queue
    blobs = [core.ScopedBlobReference(blob) for blob in input_blob_names]
    net.DequeueBlobs(
        [core.BlobReference(name)], blobs, timeout_secs=float(timeout), device_option=device
    )
    columns = [column or 0 for column in batch_columns or [0] * len(input_blob_names)]
    batches = _Batches(batch_size, columns, not dont_rebatch)
    place = _place(device)
    numbers = [global_coordinator.get_new_fetcher_id() for _ in range(num_worker_threads)]

    def fetch(number: int) -> None:
        if init_fun is not None:
            init_fun(number, global_coordinator)
        for _ in itertools.takewhile(lambda _: not queue.closed, itertools.count()):
            arrays = fetch_fun(number, batch_size)
            if not arrays:
                continue
            if len(arrays) != len(columns):
                raise ValueError(
                    f"a fetcher gave {len(arrays)} arrays: expected {len(columns)}, for "
                    + ", ".join(map(str, input_blob_names))
                )
            coordinator._state.count()
            for batch in batches.add([np.asarray(array) for array in arrays]):
                queue.put([to_value(array, place) for array in batch])

    fetchers = [lambda number=number: fetch(number) for number in numbers]
    coordinator = WorkerCoordinator(input_source_name, queue, fetchers)
    global_coordinator.add(coordinator)
    return global_coordinator


def _place(option: Any) -> Any:
    """Return torch's device of a device option; the CPU where there is no such GPU."""
    return device_of(option) if workspace.has_gpu_support else device_of(core.DeviceOption(0))
