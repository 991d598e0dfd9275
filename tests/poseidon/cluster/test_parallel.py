"""All hosts are reached, whatever one of them raises; results come in the order of the hosts."""

from __future__ import annotations

import threading

import pytest

from poseidon.cluster.parallel import close_each, for_each_host, format_problems
from poseidon.errors import JobError


def test_one_that_fails_keeps_nobody_else() -> None:
    barrier = threading.Barrier(3)

    def work(item: int) -> int:
        barrier.wait(10)  # nobody passes unless all are running
        if item == 1:
            raise JobError("in the way")
        return item * 10

    first, second, third = for_each_host(work, [0, 1, 2], name="poseidon test")
    assert (first, str(second), third) == (0, "in the way", 20)
    assert isinstance(second, JobError)


def test_another_mistake_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        for_each_host(lambda item: 1 // item, [1, 0], name="poseidon test")


def test_nobody_and_no_more_than_asked() -> None:
    assert for_each_host(str, [], name="poseidon test", limit=4) == []
    assert for_each_host(str, [1, 2, 3], name="poseidon test", limit=1) == ["1", "2", "3"]


class Closable:
    """Counts its ends; may fail, or end late."""

    def __init__(
        self, error: Exception | None = None, goes_on: threading.Event | None = None
    ) -> None:
        self.closed = threading.Event()
        self._error = error
        self._goes_on = goes_on

    def close(self) -> None:
        self.closed.set()
        if self._error is not None:
            raise self._error
        if self._goes_on is not None:
            self._goes_on.wait(30)


def test_closing_one_that_fails_closes_the_others_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    every = [Closable(), Closable(ValueError("a bad answer")), Closable()]
    close_each(every, name="poseidon test")
    assert all(one.closed.is_set() for one in every)
    assert caplog.messages == [
        "poseidon test: closing a connection failed: ValueError('a bad answer')"
    ]


def test_problems_of_one_host_and_of_several() -> None:
    assert format_problems(["no disk"], of=1) == "no disk"
    assert format_problems(["no disk", "no GPU"], of=1).splitlines()[0] == "2 problems on the host:"
    assert (
        format_problems(["no disk", "no GPU"], of=3).splitlines()[0] == "2 problems on the 3 hosts:"
    )


def test_closing_has_a_limit() -> None:
    goes_on = threading.Event()
    close_each([Closable(goes_on=goes_on)], name="poseidon test", limit_s=0.01)
    goes_on.set()
