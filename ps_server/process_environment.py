"""The environment variables of a process that computes, `ps_server.numerics` says why; and the
limits that a process raises for itself; imports without the garbage collector.

Law: this module imports no torch, so that a program which only starts such processes starts fast.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

MOST_FILES = 65_536
"""More connections than a job has, and few enough for programs that close them one by one."""

ALL_ALIGNMENTS = {"MKL_CBWR": "AUTO,STRICT"}
"""MKL's code whose bits do not depend on the alignment of memory."""


def environment(threads: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to start a process with.

    Args:
        threads: number of threads of each library, in each thread of the process; at least 1.
        inherited: the user's variables, which override how threads wait and which code MKL takes.

    Threads of OpenMP wait asleep: where another process wants the processor that a thread waits on,
    a waiting thread that spins costs more than one that must be woken. MKL takes the same code for
    all alignments and numbers of threads where it has such code (processors of Intel).
    """
    defaults = {"OMP_WAIT_POLICY": "PASSIVE", **ALL_ALIGNMENTS}
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {
        **dict.fromkeys(names, str(threads)),
        **{k: inherited.get(k) or v for k, v in defaults.items()},
    }


def raise_file_limit() -> None:
    """Let this process, and those that it starts, open as many files as the user may: connections
    count as files, and a job of many workers has more than the usual 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage in a block of imports: they leave little, and looking for it takes a
    sixth of their time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
