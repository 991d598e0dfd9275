"""All hosts are reached, whatever one of them raises; results come in the order of the hosts."""

from __future__ import annotations

import threading

import pytest

from poseidon.cluster.parallel import for_each_host
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
