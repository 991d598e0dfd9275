"""What the launcher of many hosts needs on its own machine, checked before it connects to any.

The figures are those of benchmarks/many_hosts.py: a connection over SSH has four threads, and each
host is sent the keys and addresses of all others, which the launcher holds.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from poseidon.errors import JobError

THREADS, THREADS_OF_A_HOST = 100, 4
FILES, FILES_OF_A_HOST = 100, 2
BYTES_OF_A_HOST, BYTES_OF_A_PAIR = 150 << 10, 300
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this process may have; None: as much as it wants.

    Attributes:
        threads: and processes, with all others that count.
        files: open ones, connections included.
        memory_bytes: what is free.
    """

    threads: int | None
    files: int | None
    memory_bytes: int


def own_limits() -> Limits:
    """Return the limits of this process."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    threads = [] if os.geteuid() == 0 else [resource.getrlimit(resource.RLIMIT_NPROC)[0]]
    try:
        most = (_CGROUP / "pids.max").read_text().strip()
    except OSError:
        most = "max"
    threads += [int(most)] if most.isdecimal() else []
    return Limits(
        threads=min((limit for limit in threads if limit >= 0), default=None),
        files=None if files == resource.RLIM_INFINITY else files,
        memory_bytes=psutil.virtual_memory().available,
    )


def problems(hosts: int, processes: int, limits: Limits) -> Sequence[str]:
    """Return a sentence for each limit that is too low; pure.

    Args:
        hosts: of the job, on other machines.
        processes: of the job; each has a log.
        limits: of the launcher.
    """
    threads = THREADS + THREADS_OF_A_HOST * hosts
    files = FILES + FILES_OF_A_HOST * hosts + processes
    memory = hosts * (BYTES_OF_A_HOST + BYTES_OF_A_PAIR * hosts)
    found = []
    if limits.threads is not None and limits.threads < threads:
        found.append(
            f"it needs up to {threads} threads, but may have {limits.threads}; raise `ulimit -u`, "
            "or the container's --pids-limit"
        )
    if limits.files is not None and limits.files < files:
        found.append(
            f"it needs up to {files} open files, but may have {limits.files}; raise the hard limit "
            "(/etc/security/limits.conf, or the container's --ulimit nofile)"
        )
    if limits.memory_bytes < memory:
        found.append(
            f"it needs about {memory >> 20} MiB of memory, but {limits.memory_bytes >> 20} MiB are "
            "free; start the job on a different machine, or with fewer hosts"
        )
    return found


def check_limits(hosts: int, processes: int, limits: Limits | None = None) -> None:
    """Check that this process can launch a job.

    Raises:
        JobError: a limit is too low; says what is needed, and what to do.
    """
    found = problems(hosts, processes, limits or own_limits())
    if found:
        raise JobError(f"the launcher of {hosts} hosts: " + "; and ".join(found))
