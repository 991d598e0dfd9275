"""Batches of a database, for a Data layer."""

from __future__ import annotations

from pathlib import Path

from poseidon.data.batches.batch import BatchMaker, BatchPlan
from poseidon.data.batches.numbered import NumberedReader
from poseidon.data.batches.partition import Share
from poseidon.data.batches.transform import Transform
from poseidon.data.databases.cursor import open_cursor
from poseidon.errors import DataError


class BatchReader(NumberedReader):
    """Reads one worker's share of a database, batch by batch, for ever: data (N, C, h, w) and labels (N).

    Args:
        source: the database's folder, already this client's part (see `partition.source_for`).
        backend: `Backend`, or the number of DataParameter.backend.
        batch_size: N, records in a batch, >= 1.
        transform: crop, mirror, mean, scale.
        share: which records of the database.
        seed: the job's seed, the same on all its workers: random crops and mirrors depend on it and on a
            record's place in the job, so that W workers see what one process sees.
        prefetch: batches kept ready, >= 1.
        rand_skip: start at a random record below this, the same on all workers.
        label: False when nobody wants labels; they are then an empty tensor.
        force_color: encoded pictures become three channels.

    Raises:
        DataError: the database cannot be read, or its first record does not suit the transform.
    """

    def __init__(
        self,
        *,
        source: Path,
        backend: int,
        batch_size: int,
        transform: Transform,
        share: Share,
        seed: int,
        prefetch: int = 4,
        rand_skip: int = 0,
        label: bool = True,
        force_color: bool = False,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"a data layer on {source} has batch_size {batch_size}: expected at least 1")
        plan = BatchPlan(
            batch_size=batch_size,
            transform=transform,
            share=share,
            seed=seed,
            rand_skip=rand_skip,
            label=label,
            force_color=force_color,
        )
        cursor = open_cursor(source, backend)
        try:
            maker = BatchMaker(cursor, plan)
        except BaseException:
            cursor.close()
            raise
        super().__init__(source, maker, prefetch=prefetch)
