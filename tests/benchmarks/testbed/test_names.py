"""The names of hosts: short enough, apart from each other, and telling whose they are."""

from __future__ import annotations

import pytest

from benchmarks.testbed.errors import TestbedError
from benchmarks.testbed.names import (
    MOST_GROUPS,
    MOST_HOSTS,
    GroupName,
    address,
    check_count,
    leftovers,
    owner,
)

MOST_PID = 2**22
KERNEL_LIMIT = 15


def test_the_longest_name_fits_the_kernel() -> None:
    group = GroupName(pid=MOST_PID, number=MOST_GROUPS - 1)
    assert len(group.host(MOST_HOSTS - 1)) <= KERNEL_LIMIT


def test_groups_and_hosts_have_names_of_their_own() -> None:
    groups = [GroupName(pid=pid, number=number) for pid in (1, 11, 0x1B) for number in (0, 1, 11)]
    names = [name for group in groups for name in (group.bridge, group.host(0), group.host(10))]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("pid", [1, 4711, MOST_PID])
def test_a_name_tells_its_owner(pid: int) -> None:
    group = GroupName(pid=pid, number=3)
    assert owner(group.bridge) == owner(group.host(12)) == pid


@pytest.mark.parametrize("name", ["eth0", "pb", "docker0", "pb12", "pbn1h1", "pb1n1h1x", "xpb1n1"])
def test_names_of_others_are_nobodys(name: str) -> None:
    assert owner(name) is None


def test_only_what_dead_processes_made_is_left_over() -> None:
    dead, alive = GroupName(pid=10, number=0), GroupName(pid=11, number=0)
    names = ["lo", dead.bridge, dead.host(0), alive.bridge, alive.host(0)]
    assert leftovers(names, {11}.__contains__) == [dead.bridge, dead.host(0)]


def test_addresses_differ() -> None:
    assert len({address(index) for index in range(MOST_HOSTS)}) == MOST_HOSTS


@pytest.mark.parametrize("count", [0, -1, MOST_HOSTS + 1])
def test_an_impossible_number_of_hosts_is_refused(count: int) -> None:
    with pytest.raises(TestbedError, match=f"{count} hosts"):
        check_count(count)
