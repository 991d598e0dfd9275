"""A background thread that computes numbered results before they are needed, a pool of threads for
decoding, a pool of buffers, and random numbers by record.

Law: `get` returns the results of `make(first)`, `make(first + 1)`, ... in this order. The thread is
at most `depth` results ahead. Its first error is raised by the `get` that would have returned the
result.

A pool of reusable batch buffers.

Law: a buffer returns to the pool only when the last array or tensor on it has been freed. Code that
keeps a batch (as a saved activation, or a sufficient factor that is being sent) keeps its memory
without knowing the pool.

Random numbers that depend only on a seed and a record's number in the job.

Law: no state. The crop and the mirror of a record are a hash of (seed, record number), so they do
not depend on the worker, the thread or a resume. A snapshot needs only the position.

Source: the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), used as a counter-based generator.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from poseidon.engine.own_time import WAITED
from poseidon.errors import DataError
from poseidon.exchange.device import HOST, Device


class BufferPool:
    """A pool of arrays of one shape, of float32, or of bytes. Thread-safe.

    Args:
        device: to which they are copied.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: Device = HOST
    ) -> None:
        self._new = partial(device.host_memory, *shape, dtype=dtype)
        self._free: deque[npt.NDArray[Any]] = deque()

    def take(self) -> npt.NDArray[Any]:
        """Return an uninitialized array. Its memory returns to the pool when the array is freed.

        A tensor that `torch.from_numpy` makes of it keeps it alive.
        """
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = self._new().numpy()
        lent = buffer[...]
        weakref.finalize(lent, self._free.append, buffer).atexit = False
        return lent


GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step: 2^64 / golden ratio, odd


def draw(seed: int, numbers: npt.NDArray[np.int64], lanes: int) -> npt.NDArray[np.int64]:
    """Return uniform integers in 0 .. 2^31-1.

    Args:
        seed: the seed of the job, the same on all workers. Taken modulo 2^64.
        numbers: (N) record numbers.
        lanes: the number of independent values for each record.

    Returns:
        (N, lanes) values, a pure function of seed, number and lane.
    """
    streams = _mix(
        np.array([seed % 2**64], np.uint64) + GOLDEN * np.arange(1, lanes + 1, dtype=np.uint64)
    )
    counters = _mix(GOLDEN * numbers.astype(np.uint64))
    return (_mix(counters[:, None] ^ streams[None, :]) >> np.uint64(33)).astype(np.int64)


def skipped_records(seed: int, rand_skip: int) -> int:
    """Return how many records to skip first: below `rand_skip`, the same on all workers."""
    return int(draw(seed, np.array([-1]), 1)[0, 0]) % rand_skip if rand_skip else 0


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


Made = TypeVar("Made")

# The interval at which a waiting thread checks that the other one is alive.
WATCH_S = 1.0
# With more threads the workers of a host would compete for its cores.
MAX_DECODERS = 4


class Prefetcher(Generic[Made]):
    """A thread that runs `make` from construction to `close`.

    Args:
        make: called with first, first + 1, ..., by the thread only.
        first: the argument of the first call.
        depth: the maximum number of results to keep ready, >= 1.
    """

    def __init__(self, make: Callable[[int], Made], *, first: int, depth: int, name: str) -> None:
        self._make = make
        self._depth = depth
        self._ready: deque[Made] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(first,), name=name, daemon=True)
        self._thread.start()
        _OPEN.add(self)

    def get(self) -> Made:
        """Wait for the next result and return it. Raise the exception that `make` raised."""
        with self._changed, WAITED.measure(needed=not self._ready):
            while not self._ready:
                if self._error is not None:
                    raise self._error
                if self._closed:
                    raise DataError(
                        f"the thread {self._thread.name} has ended because its reader was closed"
                    )
                if not self._thread.is_alive():
                    raise DataError(
                        f"the thread {self._thread.name} is not in this process, which was forked; "
                        "open the data after the fork"
                    )
                self._changed.wait(WATCH_S)
            made = self._ready.popleft()
            self._changed.notify_all()
            return made

    @property
    def ready(self) -> int:
        """The number of results that `get` would return without waiting."""
        return len(self._ready)

    def close(self) -> None:
        """Stop and join the thread, after the current call of `make`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self, number: int) -> None:
        try:
            while self._has_room():
                made = self._make(number)
                number += 1
                with self._changed:
                    self._ready.append(made)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - the thread's outermost frame: get() raises it in the owner
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until a result can be stored. Return False if closed."""
        with self._changed:
            while len(self._ready) >= self._depth and not self._closed:
                self._changed.wait(WATCH_S)
            return not self._closed


_OPEN: weakref.WeakSet[Prefetcher[Any]] = weakref.WeakSet()
"""Prefetchers, which are closed at the exit of the process: Python ends a thread that is inside
torch then by aborting the process.
"""


@atexit.register
def _close_all() -> None:
    for prefetcher in list(_OPEN):
        prefetcher.close()


class DecoderPool:
    """A pool of threads for decoding, which start with the first `map`."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    def map(self, function: Callable[..., Made], *arguments: Iterable[Any]) -> list[Made]:
        """Call a function with the arguments of each item, in parallel if there are several.

        Return the results in order.
        """
        items = list(zip(*arguments, strict=True))
        if len(items) == 1:
            return [function(*items[0])]
        if self._executor is None:
            threads = min(MAX_DECODERS, os.cpu_count() or 1)
            self._executor = ThreadPoolExecutor(threads, thread_name_prefix="poseidon-decode")
        return list(self._executor.map(lambda item: function(*item), items))

    def close(self) -> None:
        """Stop the threads. A second call does nothing."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
