"""A reader that keeps the records of a given reader in a database, for the next runs."""

from __future__ import annotations

import os
from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.dataio import Reader
from poseidon.caffe2.db_file_reader import DBFileReader
from poseidon.caffe2.pipeline import pipe
from poseidon.caffe2.task import Cluster, TaskGroup

_THREADS = 16


class CachedReader(DBFileReader):
    """Reads another reader's records from a database that `build_cache_step` makes if missing."""

    default_name_suffix = "cached_reader"

    def __init__(
        self,
        original_reader: Reader,
        db_path: str,
        db_type: str = "LevelDB",
        name: str | None = None,
        batch_size: int = 100,
        loop_over: bool = False,
    ) -> None:
        """Describe the reader.

        Args:
            original_reader: where the records come from when the database is made.
            db_path, db_type, name, batch_size, loop_over: see `DBFileReader`.
        """
        assert original_reader is not None, "original_reader can't be None"
        self.original_reader = original_reader
        super().__init__(db_path, db_type, name, batch_size, loop_over)

    def _init_reader_schema(self, field_names: list[str] | None = None) -> Any:
        return self.original_reader._schema

    def build_cache_step(self, overwrite: bool = False) -> Any:
        """Return a step that fills the database from the original reader; empty if it exists.

        Args:
            overwrite: whether it is written again where it exists.
        """
        if os.path.exists(self.db_path) and not overwrite:
            return core.execution_step("build_step", [])
        init_net = core.Net("init")
        self._init_field_blobs_as_empty(init_net)
        with Cluster(), core.NameScope(self.name), TaskGroup() as group:
            pipe(self.original_reader, self.ds.writer(), num_threads=_THREADS)
            copying = group.to_task().get_step()
        save_net = core.Net("save")
        save_net.Save(
            self.ds.get_blobs(),
            [],
            db=self.db_path,
            db_type=self.db_type,
            blob_name_overrides=self.ds.field_names(),
            absolute_path=True,
        )
        return core.execution_step("build_cache", [init_net, copying, save_net])
