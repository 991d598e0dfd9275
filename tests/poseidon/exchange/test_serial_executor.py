"""Calls run one after the other, at once or on a thread of their own."""

from __future__ import annotations

import threading

import pytest

from poseidon.exchange.serial_executor import SerialExecutor
from ps_server import LocalProtocolError, StalenessTimeout


def test_the_thread_computes_with_the_threads_of_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(
        "poseidon.exchange.serial_executor.prepare_thread",
        lambda: prepared.append(threading.current_thread().name),
    )
    executor = SerialExecutor("pushes", print, threaded=True)
    executor.call(lambda: prepared.append("call"))
    executor.close()
    assert prepared == ["pushes", "call"]


def test_without_a_thread_calls_run_at_once_and_raise_where_they_are_made() -> None:
    failures: list[Exception] = []
    calls = SerialExecutor("calls", failures.append, threaded=False)
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
    calls = SerialExecutor("calls", lambda error: None, threaded=True)
    done: list[int] = []
    first = calls.call(lambda: done.append(1))
    calls.call(lambda: goes_on.wait(60) and done.append(2))
    calls.drain(first)
    assert done == [1]
    goes_on.set()
    calls.drain()
    assert done == [1, 2]
    calls.close()


def test_with_a_thread_calls_run_in_order_and_failures_reach_the_owner() -> None:
    failures: list[Exception] = []
    calls = SerialExecutor("calls", failures.append, threaded=True)
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
    calls = SerialExecutor("calls", lambda error: None, threaded=True)
    calls.call(lambda: None)
    calls.close()
    with pytest.raises(LocalProtocolError, match=r"^the exchange is closed$"):
        calls.call(lambda: None)
    waiter = threading.Thread(target=calls.drain, daemon=True)
    waiter.start()
    waiter.join(60)
    assert not waiter.is_alive()


def test_waiting_for_a_device_that_hangs_has_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    goes_on = threading.Event()
    calls = SerialExecutor("calls", lambda error: None, threaded=True, timeout_s=0.05)
    calls.call(lambda: goes_on.wait(30))
    with pytest.raises(StalenessTimeout, match=r"^the calls of 'calls' did not end within 0\.05"):
        calls.drain()
    calls.close()
    sentence = "the thread calls has not ended within 0.05 s: a device or another worker hangs"
    assert caplog.messages == [sentence]
    goes_on.set()
