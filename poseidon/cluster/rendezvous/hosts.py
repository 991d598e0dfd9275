"""The hosts that the tasks of a rendezvous run on.

Law: pure. On each host the task with local rank 0, its leader, starts all processes, as many
workers as the host has tasks; the hosts are numbered by the ranks of their leaders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from poseidon.cluster.agent.messages import Join
from poseidon.errors import JobError


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


def leaders_of(tasks: Sequence[Join]) -> tuple[Join, ...]:
    """Return the leader of each host, by rank.

    Raises:
        JobError: the hosts have different numbers of tasks, or rank 0 does not lead its own.
    """
    leaders = sorted((task for task in tasks if task.local_rank == 0), key=lambda task: task.rank)
    if not leaders or leaders[0].rank != 0:
        raise JobError("rank 0 is not the first task of its host; its local rank must be 0")
    counts = Counter(task.local_rank for task in tasks)
    each = len(tasks) // len(leaders)
    if any(counts[local_rank] != len(leaders) for local_rank in range(each)) or each * len(
        leaders
    ) != len(tasks):
        raise JobError(
            f"{len(tasks)} tasks on {len(leaders)} hosts are not the same number on each host; "
            "start as many on each (--nproc_per_node, --ntasks-per-node, slots)"
        )
    return tuple(leaders)
