"""Where the workers sit: the hosts of a job, and the planes across them.

Ranks go host by host. A worker's seat is its host and its place among the workers of that host.
Plane l is the workers with place l of all hosts; there are as many planes as the smallest host has
workers. Each table belongs to one plane: to the store, the worker of that plane stands for its host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from ps_server.errors import SpecError


class Seat(NamedTuple):
    """The seat of a worker."""

    host: int = 0
    """The number of its host among the hosts with workers."""
    local_rank: int = 0
    """Its place among the workers of the host."""
    local_workers: int = 1
    """The workers of the host."""
    host_count: int = 1
    """The hosts with workers."""
    rank: int = 0
    """The worker's among all."""


class Seats:
    """The seats of all workers.

    Args:
        hosts: number of workers of each host, one or more.

    Attributes:
        host_count: the number of hosts.
        planes: the number of planes: the workers of the host that has the fewest.
    """

    def __init__(self, hosts: Sequence[int]) -> None:
        self.host_count, self.planes = len(hosts), min(hosts)
        places = ((host, local) for host, count in enumerate(hosts) for local in range(count))
        self._of_rank = tuple(
            Seat(host, local, hosts[host], len(hosts), rank)
            for rank, (host, local) in enumerate(places)
        )
        self._members: list[list[int]] = [[] for _ in range(max(hosts))]
        for seat in self._of_rank:
            self._members[seat.local_rank].append(seat.rank)

    def of(self, rank: int) -> Seat:
        """Return the seat of a worker."""
        return self._of_rank[rank]

    def members(self, local: int) -> Sequence[int]:
        """Return the workers with a local rank, by host: of all hosts if it is a plane's."""
        return self._members[local]


@cache
def seats_of(hosts: tuple[int, ...], workers: int) -> Seats:
    """Return the seats of so many workers; without hosts, each has its own.

    Raises:
        SpecError: the hosts have other numbers of workers.
    """
    if hosts and (min(hosts) < 1 or sum(hosts) != workers):
        raise SpecError(
            f"hosts are {hosts!r:.60}; expected {workers} workers in all, and one or more on each "
            "host"
        )
    return Seats(hosts or (1,) * workers)
