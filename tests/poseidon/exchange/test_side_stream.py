"""On a CPU there is no stream beside the one that computes: calls run at once, events are
nothing.
"""

from __future__ import annotations

import threading

import pytest
import torch

from poseidon.exchange.side_stream import SerialExecutor, SideStream
from ps_server import LocalProtocolError, StalenessTimeout
from tests.support.mkl import needs_mkl, threads_of_products

CPU = torch.device("cpu")


def test_on_a_cpu_nothing_is_marked_and_nothing_waits() -> None:
    side = SideStream(CPU)
    event = side.record_event()
    assert event is None
    with side.after(event):
        buffer = side.host_buffer(2, 3)
    side.wait_event(event)
    side.synchronize()
    assert buffer.shape == (2, 3)
    assert not buffer.is_pinned()


@needs_mkl
def test_the_thread_computes_with_the_threads_of_its_process() -> None:
    program = """
import torch
from poseidon.exchange.side_stream import SerialExecutor
torch.set_num_threads(1)
left, right = torch.ones(96, 128), torch.ones(128, 256)
executor = SerialExecutor(torch.device("cpu"), "pushes", print, threaded=True)
executor.call(lambda: torch.mm(left, right))
executor.close()
"""
    assert threads_of_products(program, {"OMP_NUM_THREADS": "4"}) == {1}


def test_on_a_cpu_calls_run_at_once_and_raise_where_they_are_made() -> None:
    failures: list[Exception] = []
    calls = SerialExecutor(CPU, "calls", failures.append)
    done: list[int] = []
    calls.call(lambda: done.append(1))
    assert done == [1]

    def fail() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        calls.call(fail)
    calls.drain()
    calls.close()
    assert failures == []


def test_with_a_thread_a_caller_waits_for_the_calls_up_to_one() -> None:
    goes_on = threading.Event()
    calls = SerialExecutor(CPU, "calls", lambda error: None, threaded=True)
    done: list[int] = []
    first = calls.call(lambda: done.append(1))
    calls.call(lambda: goes_on.wait(60) and done.append(2))
    calls.drain(first)
    assert done == [1]
    goes_on.set()
    calls.drain()
    assert done == [1, 2]
    calls.close()


@pytest.mark.needs("gpu")
def test_on_a_gpu_calls_run_in_order_on_a_thread_and_failures_reach_the_owner() -> None:
    failures: list[Exception] = []
    calls = SerialExecutor(torch.device("cuda"), "calls", failures.append)
    done: list[int] = []
    error = ValueError("there")

    def fail() -> None:
        raise error

    for number in range(3):
        calls.call(lambda number=number: done.append(number))
    calls.call(fail)
    calls.call(lambda: done.append(9))
    calls.drain()
    calls.close()
    assert done == [0, 1, 2]
    assert failures == [error]


def test_after_close_nothing_is_waited_for_and_nothing_runs() -> None:
    # its thread needs no GPU
    calls = SerialExecutor(torch.device("cuda"), "calls", lambda error: None)
    calls.call(lambda: None)
    calls.close()
    with pytest.raises(LocalProtocolError, match=r"^the exchange is closed$"):
        calls.call(lambda: None)
    waiter = threading.Thread(target=calls.drain, daemon=True)
    waiter.start()
    waiter.join(10)
    assert not waiter.is_alive()


def test_waiting_for_a_device_that_hangs_has_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    """The thread needs no GPU."""
    goes_on = threading.Event()
    calls = SerialExecutor(torch.device("cuda"), "calls", lambda error: None, timeout_s=0.05)
    calls.call(lambda: goes_on.wait(30))
    with pytest.raises(
        StalenessTimeout,
        match=r"^the calls of 'calls' did not end within 0\.05 s: the device hangs$",
    ):
        calls.drain()
    calls.close()
    assert caplog.messages == ["the thread calls has not ended within 0.05 s: the device hangs"]
    goes_on.set()


@pytest.mark.needs("gpu")
def test_work_on_the_side_comes_after_what_it_waits_for() -> None:
    device = torch.device("cuda")
    side = SideStream(device)
    x = torch.ones(1 << 20, device=device)
    for _ in range(50):
        x = x * 1.0001
    host = side.host_buffer(1 << 20)
    with side.after(side.record_event()):
        host.copy_(x, non_blocking=True)
    side.synchronize()
    assert torch.equal(host, x.cpu())
