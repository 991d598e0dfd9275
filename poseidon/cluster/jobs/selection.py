"""Selection of the jobs of a machinefile.

Law: a job belongs to a machinefile if it was started from that file. Only if no job was, one that
was started from a file with the same lines does, and only if the lines fix the ports: two running
jobs cannot have those in common, while any two jobs may use "a free port of this machine".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from poseidon.cluster.jobs.registry import JobRecord
from poseidon.cluster.machinefile import Host, digest_of


def jobs_of_machinefile(
    records: Sequence[JobRecord], hostfile: Path, hosts: Sequence[Host] | None
) -> tuple[JobRecord, ...]:
    """Return the jobs that were started from a machinefile.

    Args:
        records: all jobs of this user.
        hostfile: absolute path, links resolved.
        hosts: its lines; None when the file is gone.
    """
    same_file = tuple(
        record
        for record in records
        if record.hostfile is not None and Path(record.hostfile) == hostfile
    )
    if same_file or not hosts or not all(host.port for host in hosts):
        return same_file
    lines = digest_of(hosts)
    return tuple(record for record in records if record.digest == lines)


def remote_jobs_of_machinefile(
    records: Sequence[JobRecord], hostfile: Path, hosts: Sequence[Host]
) -> tuple[JobRecord, ...]:
    """Return the jobs of a machinefile among those that its hosts have recorded.

    Args:
        records: as the hosts sent them; a path in them is one of the machine that the job was
            started from.
        hostfile: absolute path, links resolved, on this machine.
        hosts: its lines.
    """
    lines = digest_of(hosts)
    same = tuple(record for record in records if record.digest == lines)
    if all(host.port for host in hosts):
        return same
    return tuple(
        record
        for record in same
        if record.hostfile is not None and Path(record.hostfile) == hostfile
    )
