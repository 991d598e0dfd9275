"""Does the same work for several hosts in parallel. If one fails, the others are still reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from poseidon.errors import JobError

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_PROBLEMS = 100
"""Lines of one error."""


def for_each_host(
    work: Callable[[Item], Result], hosts: Sequence[Item], *, name: str, limit: int | None = None
) -> list[Result | JobError]:
    """Do the work for each host on a thread of its own.

    Args:
        work: may raise JobError; each call has its own time limit. Any other exception is raised
            here.
        hosts: one call each.
        name: of the threads.
        limit: of threads at the same time; None: one for each host.

    Returns:
        In the order of the hosts the result of each, or its JobError.
    """

    def outcome(host: Item) -> Result | JobError:
        try:
            return work(host)
        except JobError as error:
            return error

    threads = len(hosts) if limit is None else min(limit, len(hosts))
    with ThreadPoolExecutor(max(1, threads), name) as pool:
        return list(pool.map(outcome, hosts))


def format_problems(problems: Sequence[str], *, of: int) -> str:
    """Join the problems of several hosts in one error: a single one as it is, else one a line, the
    first `MOST_PROBLEMS`.

    Args:
        problems: one sentence each.
        of: the number of hosts.
    """
    if len(problems) == 1:
        return problems[0]
    hosts = "host" if of == 1 else f"{of} hosts"
    more = len(problems) - MOST_PROBLEMS
    shown = [*problems[:MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
    return f"{len(problems)} problems on the {hosts}:" + "".join(f"\n  {line}" for line in shown)
