"""What the launcher of many hosts needs on its own machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from poseidon.cluster.host_checks import Limits, check_limits, limit_problems, own_limits
from poseidon.errors import JobError

ENOUGH = Limits(threads=None, files=None, memory_bytes=1 << 40)


def test_this_machine_can_launch_a_job() -> None:
    check_limits(2, 4, own_limits())
    check_limits(10_000, 20_000, ENOUGH)


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (
            replace(ENOUGH, threads=4099),
            "it needs up to 4100 threads, but may have 4099; raise `ulimit -u`, or the container's "
            "--pids-limit",
        ),
        (
            replace(ENOUGH, files=1024),
            "it needs up to 4100 open files, but may have 1024; raise the hard limit "
            "(/etc/security/limits.conf, or the container's --ulimit nofile)",
        ),
        (
            replace(ENOUGH, memory_bytes=256 << 20),
            "it needs about 432 MiB of memory, but 256 MiB are free; start the job on a different "
            "machine, or with fewer hosts",
        ),
    ],
)
def test_a_limit_that_is_too_low(limits: Limits, sentence: str) -> None:
    assert limit_problems(1000, 2000, limits) == [sentence]
    with pytest.raises(JobError) as caught:
        check_limits(1000, 2000, limits)
    assert str(caught.value) == f"the launcher of 1000 hosts: {sentence}"


def test_all_limits_at_once() -> None:
    low = Limits(threads=10, files=10, memory_bytes=10)
    assert len(limit_problems(2, 4, low)) == 3
    with pytest.raises(JobError, match=r"threads, .*; and it needs up to .* files"):
        check_limits(2, 4, low)
