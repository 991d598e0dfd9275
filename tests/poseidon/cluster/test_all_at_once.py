"""All are reached, whatever is in the way of one; results come in the order of the items."""

from __future__ import annotations

import threading

import pytest

from poseidon.cluster.all_at_once import all_at_once
from poseidon.errors import JobError


def test_one_that_fails_keeps_nobody_else() -> None:
    meeting = threading.Barrier(3)

    def work(item: int) -> int:
        meeting.wait(10)  # nobody gets past unless all are at it
        if item == 1:
            raise JobError("in the way")
        return item * 10

    first, second, third = all_at_once(work, [0, 1, 2], name="poseidon test")
    assert (first, str(second), third) == (0, "in the way", 20)
    assert isinstance(second, JobError)


def test_another_mistake_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        all_at_once(lambda item: 1 // item, [1, 0], name="poseidon test")


def test_nobody_and_no_more_than_asked() -> None:
    assert all_at_once(str, [], name="poseidon test", most=4) == []
    assert all_at_once(str, [1, 2, 3], name="poseidon test", most=1) == ["1", "2", "3"]
