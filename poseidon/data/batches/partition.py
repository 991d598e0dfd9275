"""Which records a worker reads: pure arithmetic, no files.

Law: W workers with batch K read together exactly the records that one process with batch W*K reads, batch by
batch, also across the end of the database and also when its length is no multiple of W. The records form one
endless stream (stream record r is database record r mod length); a share is a regular part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from poseidon.errors import DataError
from poseidon.proto.caffe_pb2 import TEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a database's endless stream of records that one worker reads.

    The stream is dealt out like cards, `block` records at a time, to `step` readers; this one is number
    `first`. Training deals single records; testing deals whole batches, so that the workers score exactly
    the batches that one process scores.

    Args:
        first: this reader, 0 <= first < step.
        step: number of readers of this database.
        block: records dealt at a time, >= 1.
        client: which part of a divided database this is, 0 <= client < clients.
        clients: number of parts that the job's records were divided into, 1 when all read one database.
    """

    first: int = 0
    step: int = 1
    block: int = 1
    client: int = 0
    clients: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.first < self.step and self.block >= 1 and 0 <= self.client < self.clients):
            raise ValueError(f"not a share: {self!r}")

    def record(self, n: int) -> int:
        """Stream record that is this reader's n-th, n >= 0."""
        return int(self.records(n, 1)[0])

    def records(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Stream records of this reader's `count` records from its `first`-th on."""
        deal, within = np.divmod(np.arange(first, first + count, dtype=np.int64), self.block)
        return (deal * self.step + self.first) * self.block + within

    def job_records(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Numbers for the same records that no other reader of the job uses.

        With one record dealt at a time they are the numbers that one process would give the same records, so
        that random crops and mirrors do not depend on the number of workers.
        """
        return self.records(first, count) * self.clients + self.client


def share_for(
    *,
    phase: int,
    shared_file_system: bool,
    client: int,
    clients: int,
    local_rank: int,
    local_workers: int,
    rank: int,
    workers: int,
    batch: int,
) -> Share:
    """Return the share of one worker.

    Args:
        phase: TRAIN or TEST of the schema.
        shared_file_system: True when all clients read one database, False when each has its own part.
        client: this machine, of `clients`.
        local_rank: this worker among the `local_workers` of its client.
        rank: this worker among all `workers` of the job.
        batch: records in a batch of this worker.
    """
    block = batch if phase == TEST else 1
    if shared_file_system:
        return Share(first=rank, step=workers, block=block)
    return Share(first=local_rank, step=local_workers, block=block, client=client, clients=clients)


def source_for(source: Path, *, shared_file_system: bool, client: int, clients: int) -> Path:
    """Return the database that client `client` of `clients` opens for a layer's `source`.

    With a shared file system, the source itself. Without, `<source>_<client>`; a single client also takes the
    undivided source, and prefers it, because the part `_0` beside it would be only some of the records.

    Raises:
        DataError: the part is missing, or the parts were made for more clients than the job has.
    """
    if shared_file_system or (clients == 1 and source.exists()):
        return source
    part = part_path(source, client)
    if not part.exists():
        if clients == 1:
            return source
        raise DataError(
            f"client {client} of {clients} reads {part} (shared_file_system is false), which does not exist: "
            f"make it with: poseidon partition_data --num_partitions={clients} {source}"
        )
    if part_path(source, clients).exists():
        raise DataError(
            f"{source} was divided for more than the {clients} clients of this job, as "
            f"{part_path(source, clients).name} shows: remove its parts and divide it again with: "
            f"poseidon partition_data --num_partitions={clients} {source}"
        )
    return part


def part_path(source: Path, part: int) -> Path:
    """Where part number `part` of the database `source` lies: beside it, as `<source>_<part>`."""
    return source.with_name(f"{source.name}_{part}")
