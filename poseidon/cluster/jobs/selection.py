"""Which jobs a user means by a job id or by a machinefile.

Law: a job belongs to a machinefile if it was started from that very file. Only if no job was, one that was
started from a file with the same lines does, and only if the lines fix the ports: two running jobs cannot
have those in common, while any two jobs may say "a free port of this machine".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from poseidon.cluster.jobs.registry import JobRecord
from poseidon.cluster.machinefile import Client


def jobs_of_machinefile(
    records: Sequence[JobRecord], hostfile: Path, clients: Sequence[Client] | None
) -> tuple[JobRecord, ...]:
    """The jobs that were started from a machinefile.

    Args:
        records: all jobs of this user.
        hostfile: absolute path, links resolved.
        clients: its lines; None when the file is gone.
    """
    same_file = tuple(
        record for record in records if record.hostfile is not None and Path(record.hostfile) == hostfile
    )
    if same_file or not clients or not all(client.port for client in clients):
        return same_file
    return tuple(record for record in records if record.clients == tuple(clients))


def far_jobs_of_machinefile(
    records: Sequence[JobRecord], hostfile: Path, clients: Sequence[Client]
) -> tuple[JobRecord, ...]:
    """The jobs of a machinefile among those that its hosts have on record.

    Args:
        records: as the hosts sent them; a path in them is one of the machine that the job was started from.
        hostfile: absolute path, links resolved, on this machine.
        clients: its lines.
    """
    same = tuple(record for record in records if record.clients == tuple(clients))
    if all(client.port for client in clients):
        return same
    return tuple(
        record for record in same if record.hostfile is not None and Path(record.hostfile) == hostfile
    )
