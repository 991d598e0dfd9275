"""The cache of a reader: made once, read afterwards."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.cached_reader import CachedReader
from poseidon.caffe2.dataset import Dataset
from poseidon.caffe2.schema import FeedRecord, NewRecord, Struct
from poseidon.caffe2.session import LocalSession


def source(size: int) -> object:
    net = core.Net("source")
    with core.NameScope("source"):
        values = Struct(("label", np.arange(size)))
        blobs = NewRecord(net, values)
    FeedRecord(blobs, values)
    workspace.RunNetOnce(net)
    return Dataset(blobs).reader()


def read(reader: CachedReader) -> list[int]:
    init, net = core.Net("init"), core.Net("read")
    reader.setup_ex(init, None)
    stop, record = reader.read_record(net)
    workspace.RunNetOnce(init)
    found: list[int] = []
    while True:
        workspace.RunNetOnce(net)
        found += workspace.FetchBlob(record.label()).tolist()
        if workspace.FetchBlob(stop):
            return sorted(found)


def test_the_first_source_stays_until_the_cache_is_overwritten(tmp_path: Path) -> None:
    path = str(tmp_path / "cache.db")
    for size, overwrite, expected in ((7, False, 7), (9, False, 7), (9, True, 9)):
        workspace.ResetWorkspace()
        reader = CachedReader(source(size), path, db_type="minidb", batch_size=3)
        LocalSession().run(reader.build_cache_step(overwrite=overwrite))
        assert read(reader) == list(range(expected))
