"""The hosts that the tasks of a rendezvous run on.

Law: pure. On each host the task with local rank 0 starts all processes, as many workers as the
host has tasks; the hosts are numbered by the ranks of these tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.cluster.agent.messages import Join
from poseidon.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHost:
    """A host that tasks run on.

    Attributes:
        first: the task with local rank 0.
        tasks: how many run there.
    """

    first: Join
    tasks: int


def rejection_reason(task: Join, others: Sequence[Join], *, size: int, version: str) -> str | None:
    """Return why a task cannot join; None when it can.

    Args:
        task: the one that asks to join.
        others: those that have joined.
        size: the number of tasks that rank 0 expects.
        version: of rank 0's Poseidon.
    """
    who = f"rank {task.rank} on {task.host}"
    if task.version != version:
        return (
            f"{who} has Poseidon {task.version}, rank 0 has {version}; expected the same everywhere"
        )
    if task.size != size:
        return f"{who} expects {task.size} tasks, rank 0 {size}; do they belong to one job?"
    if task.rank >= size:
        return f"{who} is not one of {size} tasks"
    twin = next((other for other in others if other.rank == task.rank), None)
    if twin is not None:
        return f"{who} has joined already, on {twin.host}; expected each rank once"
    return None


def hosts_of(tasks: Sequence[Join]) -> tuple[TaskHost, ...]:
    """Return the hosts of tasks, by the rank of their first tasks.

    A task with local rank 0 is the first one of a host. Each other one is on a host of its name
    with as many tasks before it as its local rank says; of several, as containers of one machine,
    on the one whose first task has a rank that is lower by the local rank.

    Raises:
        JobError: local ranks leave one out, or rank 0 is not the first task of its host.
    """
    if any(task.local_rank for task in tasks if task.rank == 0):
        raise JobError(
            "rank 0 has a local rank other than 0; expected it to be the first task of its host"
        )
    hosts: dict[int, list[Join]] = {}
    for task in sorted(tasks, key=lambda task: (task.local_rank, task.rank)):
        if task.local_rank == 0:
            hosts[task.rank] = [task]
            continue
        fitting = {
            first: found
            for first, found in hosts.items()
            if found[0].host == task.host and len(found) == task.local_rank
        }
        if not fitting:
            raise JobError(
                f"rank {task.rank} on {task.host} has local rank {task.local_rank}, and no task "
                f"there has local rank {task.local_rank - 1}; expected 0, 1, ... on each host"
            )
        block = fitting.get(task.rank - task.local_rank)
        (block or next(iter(fitting.values()))).append(task)
    return tuple(TaskHost(first=found[0], tasks=len(found)) for found in hosts.values())
