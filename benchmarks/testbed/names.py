"""The names and addresses of a measurement's hosts.

Law: pure. A name shows which process made it, so that two measurements never collide and leftovers
can be told from hosts in use. The kernel allows 15 characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.testbed.errors import TestbedError

MOST_HOSTS = 99
MOST_GROUPS = 99
SUBNET = "10.213.0"
"""Each group of hosts has a bridge of its own, so all groups may use the same addresses."""

_NAME = re.compile(r"pb(?P<pid>[0-9a-f]{1,6})n(?P<group>[0-9]{1,2})(h[0-9]{1,2})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupName:
    """Names everything of one group of hosts.

    Attributes:
        pid: the process that made the group.
        number: which of its groups, 0..MOST_GROUPS-1.
    """

    pid: int
    number: int

    @property
    def bridge(self) -> str:
        """The bridge that joins the hosts."""
        return f"pb{self.pid:x}n{self.number}"

    def host(self, index: int) -> str:
        """Host `index`: its network namespace, and its port of the bridge."""
        return f"{self.bridge}h{index}"


def address(index: int, subnet: str = SUBNET) -> str:
    """Return the address of host `index`."""
    return f"{subnet}.{index + 1}"


def check_count(count: int) -> None:
    """Whether so many hosts can be made.

    Raises:
        TestbedError: too few or too many.
    """
    if not 1 <= count <= MOST_HOSTS:
        raise TestbedError(f"{count} hosts: expected 1 to {MOST_HOSTS}")


def owner(name: str) -> int | None:
    """Return the process that made the thing called `name`; None if the name is not one of ours."""
    match = _NAME.fullmatch(name)
    return int(match["pid"], 16) if match else None


def leftovers(names: Iterable[str], alive: Callable[[int], bool]) -> list[str]:
    """Return the `names` that belong to processes that are gone."""
    owned = ((name, owner(name)) for name in names)
    return sorted(name for name, pid in owned if pid is not None and not alive(pid))
