"""Which hosts the tasks of a meeting make up.

Law: pure. On each host the task with local rank 0 starts all processes, as many workers as the host has tasks; the hosts are
numbered by the ranks of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.cluster.rendezvous.wire import Arrival
from poseidon.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """One host.

    Attributes:
        rank: of the task that leads it.
        address: its own.
        host: its name.
        tasks: how many of the tasks run there.
        python: the interpreter of the task that leads it.
        folder: where that was started.
    """

    rank: int
    address: str
    host: str
    tasks: int
    python: str = ""
    folder: str = ""


def objection_to(arrival: Arrival, others: Sequence[Arrival], *, size: int, version: str) -> str | None:
    """Why a task cannot take part; None when it can.

    Args:
        arrival: who comes.
        others: who has come.
        size: how many tasks rank 0 was told of.
        version: of rank 0's Poseidon.
    """
    who = f"rank {arrival.rank} on {arrival.host}"
    if arrival.version != version:
        return f"{who} has Poseidon {arrival.version}, rank 0 has {version}; expected the same everywhere"
    if arrival.size != size:
        return f"{who} was told of {arrival.size} tasks, rank 0 of {size}; do they belong to one job?"
    if arrival.rank >= size:
        return f"{who} is none of {size} tasks"
    twin = next((other for other in others if other.rank == arrival.rank), None)
    if twin is not None:
        return f"{who} is there already, on {twin.host}; expected each rank once"
    return None


def hosts_of(arrivals: Sequence[Arrival]) -> tuple[HostPlan, ...]:
    """The hosts, by the ranks of their leaders.

    Args:
        arrivals: all tasks.

    Raises:
        JobError: the hosts have different numbers of tasks, or rank 0 does not lead its own.
    """
    leaders = sorted((task for task in arrivals if task.local_rank == 0), key=lambda task: task.rank)
    if not leaders or leaders[0].rank != 0:
        raise JobError("rank 0 has a local rank other than 0; expected it to be the first task of its host")
    counts = Counter(task.local_rank for task in arrivals)
    each = len(arrivals) // len(leaders)
    if any(counts[local_rank] != len(leaders) for local_rank in range(each)) or each * len(leaders) != len(
        arrivals
    ):
        raise JobError(
            f"{len(arrivals)} tasks on {len(leaders)} hosts are not the same number on each; expected so "
            "(--nproc_per_node, --ntasks-per-node, slots)"
        )
    return tuple(
        HostPlan(
            rank=task.rank,
            address=task.address,
            host=task.host,
            tasks=each,
            python=task.python,
            folder=task.folder,
        )
        for task in leaders
    )
