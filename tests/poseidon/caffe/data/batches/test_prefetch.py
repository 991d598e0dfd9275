"""The background thread: order, bound, errors, end."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from poseidon.caffe.data.batches.prefetch import BufferPool, DecoderPool, Prefetcher, draw
from poseidon.errors import DataError


def test_memory_is_reused_after_the_last_reference() -> None:
    pool = BufferPool((2, 3))
    tensor = torch.from_numpy(pool.take())
    address = tensor.data_ptr()
    del tensor
    assert torch.from_numpy(pool.take()).data_ptr() == address


def test_memory_that_is_seen_is_left_alone() -> None:
    pool = BufferPool((2, 3))
    tensor = torch.from_numpy(pool.take())
    view = tensor.reshape(6)[2:]
    address = tensor.data_ptr()
    view.fill_(7)
    del tensor
    others = [pool.take() for _ in range(3)]
    for other in others:
        assert other.ctypes.data != address
        other.fill(0)
    assert view.tolist() == [7] * 4


def test_memory_held_by_autograd_is_left_alone() -> None:
    pool = BufferPool((2, 3))
    data = torch.from_numpy(pool.take()).fill_(2)
    weight = torch.ones(3, requires_grad=True)
    loss = (data * weight).sum()
    del data
    pool.take().fill(0)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4, 4, 4]


def test_a_draw_depends_on_nothing_but_seed_number_and_lane() -> None:
    together = draw(7, np.arange(100), 3)
    np.testing.assert_array_equal(together[40:41], draw(7, np.array([40]), 3))
    np.testing.assert_array_equal(together[:, :2], draw(7, np.arange(100), 2))
    assert not np.array_equal(together, draw(8, np.arange(100), 3))
    # Held for ever: a snapshot of today must go on with the same crops tomorrow.
    assert draw(1, np.array([0, 1, 10**12]), 2).tolist() == PINNED


def test_any_seed_will_do() -> None:
    for seed in (-1, 0, 2**63, 2**70):
        assert draw(seed, np.array([-1, 0]), 1).min() >= 0


def test_lanes_are_uniform_and_independent() -> None:
    numbers = np.arange(40_000)
    draws = np.concatenate([draw(0, numbers, 3), draw(1, numbers, 1)], axis=1)
    assert draws.min() >= 0
    assert draws.max() < 2**31
    bits = draws[:, :, None] >> np.arange(31) & 1
    assert abs(bits.mean(axis=0) - 0.5).max() < 0.012
    correlation = np.corrcoef((draws / 2**31).T)
    assert abs(correlation - np.eye(4)).max() < 0.02
    neighbours = np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]
    assert abs(neighbours) < 0.02
    counts = np.bincount(draws[:, 0] % 30, minlength=30)
    assert abs(counts / counts.mean() - 1).max() < 0.12


PINNED = [[1852969470, 2113131441], [1194085295, 1372011722], [1069928129, 513409362]]


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
        assert fourth.wait(60), "having handed one out it makes three more"
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


def test_a_forked_process_is_told_that_it_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetcher = Prefetcher(int, first=0, depth=1, name="poseidon-test")
    prefetcher.close()
    monkeypatch.setattr(prefetcher, "_closed", False)
    with pytest.raises(DataError, match="was forked; open the data after the fork"):
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
