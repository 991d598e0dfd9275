"""Small databases for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from poseidon.caffe.data.batches.numbered import Share
from poseidon.caffe.data.cursor import open_writer
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_datum
from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.layers.sources import ReadingSource
from poseidon.caffe.proto.caffe_pb2 import DataParameter, LayerParameter
from ps_server.protocol.seats import Seat, seats_of

BACKENDS = tuple(Backend)
SECOND_OF_TWO = Seat(host=1, host_count=2)
"""The place of the second of two clients."""


def make_database(path: Path, backend: Backend, records: Iterable[tuple[bytes, bytes]]) -> Path:
    """Make a database of these records at `path`."""
    writer = open_writer(path, backend)
    for key, value in records:
        writer.put(key, value)
    writer.close()
    return path


def picture(number: int, shape: tuple[int, int, int] = (3, 4, 5)) -> npt.NDArray[np.uint8]:
    """Return an image (C, H, W) that depends on its number only."""
    return np.random.default_rng(number).integers(0, 256, shape, np.uint8)


def make_pictures(
    path: Path,
    count: int,
    *,
    backend: Backend = Backend.LMDB,
    shape: tuple[int, int, int] = (3, 4, 5),
) -> Path:
    """Make a database of `count` raw Datums: record i has key %05d, picture(i) and label i."""
    return make_database(
        path, backend, ((b"%05d" % i, encode_datum(picture(i, shape), i)) for i in range(count))
    )


def worker_share(
    phase: int, rank: int, workers: int, batch: int, *, clients: int = 1, shared: bool = True
) -> Share:
    """Return the share that a layer of worker `rank` reads, with as many workers on each client."""
    place = seats_of((workers // clients,) * clients, workers).of(rank)
    context = LayerContext(phase=phase, seed=0, rank=rank, workers=workers, seat=place)
    block = DataParameter(shared_file_system=shared)
    return ReadingSource(LayerParameter(), context).share(block, batch)
