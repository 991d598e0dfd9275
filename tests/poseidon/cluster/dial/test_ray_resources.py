"""What each client asks of Ray's nodes, and the sentence for a cluster that lacks it."""

from __future__ import annotations

import pytest

from poseidon.cluster.dial.ray_resources import (
    RayNode,
    describe_lack,
    parse_resources,
    pinned,
)
from poseidon.errors import UsageError

NODES = [
    RayNode(
        id=str(number), address=f"10.0.0.{number}", name=f"node{number}", resources={"CPU": 4.0}
    )
    for number in (1, 2)
]


@pytest.mark.parametrize(
    ("text", "found"),
    [("", {}), ("CPU=4", {"CPU": 4.0}), ("CPU=0.5+ trainer=1", {"CPU": 0.5, "trainer": 1.0})],
)
def test_resources_of_a_flag(text: str, found: dict[str, float]) -> None:
    assert parse_resources(text, "--launcher=ray:resources") == found


@pytest.mark.parametrize(
    "text", ["CPU", "CPU=", "CPU=x", "CPU=-1", "CPU=nan", "CPU=inf", "=1", "a b=1"]
)
def test_text_that_is_no_list_of_resources(text: str) -> None:
    with pytest.raises(UsageError, match="--launcher=ray:resources"):
        parse_resources(text, "--launcher=ray:resources")


def test_a_resource_is_given_once() -> None:
    with pytest.raises(UsageError, match="--launcher=ray:resources: 'CPU' is given twice"):
        parse_resources("CPU=1+CPU=2", "--launcher=ray:resources")


@pytest.mark.parametrize(
    ("address", "more"),
    [("any", {}), ("10.0.0.2", {"node:10.0.0.2": 0.001}), ("node1", {"node:10.0.0.1": 0.001})],
)
def test_a_line_of_the_machinefile_may_name_a_node(address: str, more: dict[str, float]) -> None:
    assert pinned({"CPU": 1.0}, address, NODES) == {"CPU": 1.0, **more}


@pytest.mark.parametrize("text", ["CPU=0.00001", "CPU=1+GPU=1.5"])
def test_amounts_that_ray_does_not_take(text: str) -> None:
    with pytest.raises(
        UsageError,
        match=f"--launcher=ray:resources: Ray has no such amount as '{text.split('+')[-1]}'",
    ):
        parse_resources(text, "--launcher=ray:resources")


def test_a_line_that_names_no_node_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        pinned({}, "node7", NODES)
    assert str(caught.value) == (
        "no node of the Ray cluster is node7; its nodes are 10.0.0.1, 10.0.0.2; 'any' takes any "
        "of them"
    )


def test_a_lack_names_what_is_needed_and_what_is_there() -> None:
    bundles = [{"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 1.0, "shards": 1.0}]
    free = {"CPU": 3.0, "memory": 1e9, "object_store_memory": 1e9, "node:10.0.0.1": 1.0}
    group = "ddc5a8659923dfdd4348c1bb0b3302000000"
    free |= {
        f"CPU_group_{group}": 1.0,
        f"CPU_group_0_{group}": 1.0,
        f"bundle_group_1_{group}": 1000.0,
    }
    assert describe_lack(bundles, NODES, free) == (
        "3 clients need a node each: 2 with CPU=2 and 1 with CPU=1, shards=1; the Ray cluster has "
        "2 nodes "
        "(10.0.0.1 has CPU=4; 10.0.0.2 has CPU=4), and free of all that is CPU=3"
    )
