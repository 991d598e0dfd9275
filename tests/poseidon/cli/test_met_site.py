"""The machines of a meeting as those of a job."""

from __future__ import annotations

import argparse

import pytest

from poseidon.cli.met_site import MetSite, share_out_devices
from poseidon.cluster.arrivals import HostPlan
from poseidon.cluster.met_host import MetHost
from poseidon.errors import UsageError


def test_one_client_for_each_host() -> None:
    plans = [HostPlan(rank=rank, address=f"10.0.0.{rank}", host=f"node{rank}", tasks=2) for rank in (0, 2)]
    site = MetSite([(plan, MetHost(plan.host, plan.address, lambda _: None)) for plan in plans])
    assert [(client.id, client.host, client.port) for client in site.clients] == [
        (0, "10.0.0.0", 0),
        (1, "10.0.0.2", 0),
    ]


@pytest.mark.parametrize(
    ("tasks", "gpu", "threads", "expected"),
    [
        (1, "0,1", 1, ("0,1", 1)),
        (1, "all", 1, ("all", 1)),
        (1, "", 3, ("", 3)),
        (4, "", 1, ("", 4)),
        (4, "", 4, ("", 4)),
        (3, "all", 1, ("0,1,2", 1)),
        (2, "1,3", 1, ("1,3", 1)),
    ],
)
def test_several_tasks_are_several_workers(
    tasks: int, gpu: str, threads: int, expected: tuple[str, int]
) -> None:
    flags = argparse.Namespace(gpu=gpu, num_app_threads=threads)
    share_out_devices(flags, tasks)
    assert (flags.gpu, flags.num_app_threads) == expected


@pytest.mark.parametrize(
    ("tasks", "gpu", "threads", "message"),
    [
        (2, "", 3, "--num_app_threads=3 with 2 tasks on each host"),
        (2, "0", 1, "--gpu=0 with 2 tasks on each host"),
    ],
)
def test_flags_that_say_another_number(tasks: int, gpu: str, threads: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        share_out_devices(argparse.Namespace(gpu=gpu, num_app_threads=threads), tasks)
