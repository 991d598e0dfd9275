"""Distribution of the records of a source among workers. Pure arithmetic, no files.

Law: W workers with batch K read together exactly the records that one process with batch W*K reads,
batch by batch, also across the end of the database and also if its length is not a multiple of W.
The records form an endless stream (stream record r is database record r mod length); a share is a
regular subset of it.
"""

from __future__ import annotations

import itertools
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from poseidon.base.hints import own_command, short_path
from poseidon.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The subset of a database's endless stream of records that one worker reads.

    The stream is distributed round robin, in blocks of `block` records, to `step` readers; this is
    reader `first`. The block is one record in training. It is a batch in testing, so that the
    workers score exactly the batches that one process scores.

    Args:
        first: the index of this reader, 0 <= first < step.
        step: the number of readers of this database.
        block: the number of records in a block, >= 1.
        client: the number of the part of a divided database, 0 <= client < clients.
        clients: the number of parts of the job's records; 1 if all workers read one database.
    """

    first: int = 0
    step: int = 1
    block: int = 1
    client: int = 0
    clients: int = 1

    def __post_init__(self) -> None:
        if not (
            0 <= self.first < self.step and self.block >= 1 and 0 <= self.client < self.clients
        ):
            raise ValueError(f"invalid share: {self!r}")

    def record(self, n: int) -> int:
        """Return the stream record that is this reader's n-th, n >= 0."""
        return int(self.records(n, 1)[0])

    def records(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the stream records of this reader's records first, ..., first + count - 1."""
        block, within = np.divmod(np.arange(first, first + count, dtype=np.int64), self.block)
        return (block * self.step + self.first) * self.block + within

    def job_records(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return numbers for the same records that are unique in the job.

        With `block` 1 they are the numbers that one process gives the same records, so that random
        crops and mirrors do not depend on the number of workers.
        """
        return self.records(first, count) * self.clients + self.client

    def fresh_records(self, batch: int, batch_size: int, length: int) -> int:
        """Return how many leading records of batch `batch` belong to the first
        epoch of a source of `length` records.
        """
        return int((self.records(batch * batch_size, batch_size) < length).sum())


def source_for(source: Path, *, shared_file_system: bool, client: int, clients: int) -> Path:
    """Return the database that client `client` of `clients` opens for a layer's `source`.

    With a shared file system this is the source itself, otherwise `<source>_<client>`. A single
    client prefers the undivided source, because a part `_0` beside it would have only some of the
    records.

    Raises:
        DataError: the part is missing, or the source was divided for more clients than the job has.
    """
    if shared_file_system or (clients == 1 and source.exists()):
        return source
    part = part_path(source, client)
    if not part.exists():
        if clients == 1:
            return source
        raise DataError(
            f"client {client} of {clients} reads {part} (shared_file_system is false), which does "
            f"not exist{_instead_of_parts(source, clients)}"
        )
    numbers = itertools.count(clients)
    parts = next(number for number in numbers if not part_path(source, number).exists())
    if parts > clients:
        raise DataError(
            f"{source} was divided for {parts} clients, but this job has {clients}: remove its "
            f"parts, and divide it again with: {_division(source, clients)}"
        )
    return part


def _instead_of_parts(source: Path, clients: int) -> str:
    """Return the end of the sentence on a missing part: what to do."""
    if source.exists():
        return (
            f": write shared_file_system: true if all clients can read {source}, "
            f"or divide it with: {_division(source, clients)}"
        )
    return (
        f", nor does {source}: make it first; then write shared_file_system: true if all clients "
        f"can read it, or divide it with: {_division(source, clients)}"
    )


def _division(source: Path, clients: int) -> str:
    path = shlex.quote(short_path(source))
    return f"{own_command()} partition_data --num_partitions={clients} {path}"


def part_path(source: Path, part: int) -> Path:
    """Return the path of part number `part` of the database `source`: `<source>_<part>`."""
    return source.with_name(f"{source.name}_{part}")
