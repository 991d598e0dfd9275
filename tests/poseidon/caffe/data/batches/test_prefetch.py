"""The background thread: order, bound, errors, end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from poseidon.caffe.data.batches.prefetch import DecoderPool, Prefetcher
from poseidon.errors import DataError


def test_results_come_in_order_and_never_more_than_depth_ahead() -> None:
    started: list[int] = []
    fourth = threading.Event()

    def make(number: int) -> int:
        started.append(number)
        if number == 8:
            fourth.set()
        return number * number

    prefetcher = Prefetcher(make, first=5, depth=3, name="poseidon-test")
    try:
        assert prefetcher.get() == 25
        assert fourth.wait(10), "having handed one out it makes three more"
        assert started == [5, 6, 7, 8]
        assert [prefetcher.get() for _ in range(5)] == [36, 49, 64, 81, 100]
    finally:
        prefetcher.close()


def test_an_error_comes_after_what_was_made_before_it() -> None:
    def make(number: int) -> int:
        if number == 2:
            raise DataError("record 2 is damaged")
        return number

    prefetcher = Prefetcher(make, first=0, depth=4, name="poseidon-test")
    assert [prefetcher.get(), prefetcher.get()] == [0, 1]
    for _ in range(2):
        with pytest.raises(DataError, match="record 2 is damaged"):
            prefetcher.get()
    prefetcher.close()


def test_close_ends_a_thread_that_waits_for_room() -> None:
    prefetcher = Prefetcher(lambda number: number, first=0, depth=1, name="poseidon-test")
    assert prefetcher.get() == 0
    prefetcher.close()
    prefetcher.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "poseidon-test"]


def test_a_closed_prefetcher_raises() -> None:
    prefetcher = Prefetcher(lambda number: number, first=0, depth=1, name="poseidon-test")
    prefetcher.close()
    with pytest.raises(DataError, match="was closed"):
        for _ in range(2):
            prefetcher.get()


def test_a_decoder_pool_keeps_the_order_and_can_be_closed_twice() -> None:
    pool = DecoderPool()
    pool.close()
    assert pool.map(lambda a, b: a + b, range(100), range(100)) == list(range(0, 200, 2))
    pool.close()
    pool.close()


AT_EXIT = """
import threading, torch
from poseidon.caffe.data.batches.prefetch import Prefetcher
began, numbers = threading.Event(), torch.rand(1_000_000)
def make(number):
    began.set()
    return numbers.sort()
prefetcher = Prefetcher(make, first=0, depth=3, name="poseidon-test")
began.wait()
"""


def test_a_process_may_end_while_a_thread_is_inside_torch() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
