"""All hosts are reached, whatever one of them raises; results come in the order of the hosts."""

from __future__ import annotations

import threading

import pytest

from poseidon.cluster.process import for_each_host, format_problems
from poseidon.errors import JobError


def test_one_that_fails_keeps_nobody_else() -> None:
    barrier = threading.Barrier(3)

    def work(item: int) -> int:
        barrier.wait(60)  # nobody passes unless all are running
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


def test_problems_of_one_host_and_of_several() -> None:
    assert format_problems(["no disk"], of=1) == "no disk"
    assert format_problems(["no disk", "no GPU"], of=1).splitlines()[0] == "2 problems on the host:"
    assert (
        format_problems(["no disk", "no GPU"], of=3).splitlines()[0] == "2 problems on the 3 hosts:"
    )
    many = format_problems(["no disk"] * 10_000, of=10_000).splitlines()
    assert len(many) == 102 and many[-1] == "  and 9900 more"
