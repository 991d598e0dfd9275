"""Reader of records whose columns are the blobs of a database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from poseidon.base.settings import expanded
from poseidon.caffe2 import core, scope, workspace
from poseidon.caffe2.dataio import Reader
from poseidon.caffe2.dataset import Dataset
from poseidon.caffe2.schema import from_column_list
from poseidon.caffe2.workspace import c as C


class DBFileReader(Reader):
    """Reads records, in an order that is drawn, from the saved columns of a data set."""

    default_name_suffix = "db_file_reader"

    def __init__(
        self,
        db_path: str,
        db_type: str,
        name: str | None = None,
        batch_size: int = 100,
        loop_over: bool = False,
        field_names: list[str] | None = None,
    ) -> None:
        """Describe the reader.

        Args:
            db_path: a database with a blob for each column.
            db_type: its type, e.g. "minidb".
            name: the scope of the blobs; by default the file's name with `default_name_suffix`.
            batch_size: the records of a batch.
            loop_over: whether it begins again at its end.
            field_names: the columns; by default all of the database, in alphabetic order.

        Raises:
            AssertionError: there is no path, or databases of this type are not known.
        """
        assert db_path is not None, "db_path can't be None."
        known = C.registered_dbs()
        assert db_type in known, f"db_type [{db_type}] is not available; choose one of {known}."
        self.db_path = str(expanded(db_path))
        self.db_type = db_type
        self.name = name or f"{Path(db_path).name.rsplit('.', 1)[0]}_{self.default_name_suffix}"
        self.batch_size = batch_size
        self.loop_over = loop_over
        super().__init__(self._init_reader_schema(field_names))
        self.ds = Dataset(self._schema, f"{self.name}_dataset")
        self.ds_reader: Any = None

    def _init_reader_schema(self, field_names: list[str] | None = None) -> Any:
        """Return the schema of given columns, or of the blobs of the database, which are loaded."""
        if field_names:
            return from_column_list(field_names)
        with core.NameScope(self.name):
            prefix = scope.CurrentNameScope()
        where: dict[str, Any] = {"absolute_path": True, "db": self.db_path, "db_type": self.db_type}
        load = core.CreateOperator("Load", [], [], **where, load_all=True, add_prefix=prefix)
        workspace.RunOperatorOnce(load)
        names = sorted(blob for blob in workspace.Blobs() if blob.startswith(prefix))
        return from_column_list([name.removeprefix(prefix) for name in names])

    def setup_ex(self, init_net: Any, finish_net: Any) -> None:
        """See `Reader`: the columns are loaded once."""
        if self.ds_reader is not None:
            self.ds_reader.setup_ex(init_net, finish_net)
            return
        self._init_field_blobs_as_empty(init_net)
        init_net.Load(
            [],
            self.ds.get_blobs(),
            db=self.db_path,
            db_type=self.db_type,
            absolute_path=True,
            source_blob_names=self.ds.field_names(),
        )
        self.ds_reader = self.ds.random_reader(
            init_net, batch_size=self.batch_size, loop_over=self.loop_over
        )
        self.ds_reader.sort_and_shuffle(init_net)
        self.ds_reader.computeoffset(init_net)

    def read(self, read_net: Any) -> tuple[Any, Any]:
        assert self.ds_reader is not None, "setup_ex must be called first"
        return self.ds_reader.read(read_net)  # type: ignore[no-any-return]

    def _init_field_blobs_as_empty(self, init_net: Any) -> None:
        with core.NameScope(self.name):
            self.ds.init_empty(init_net)
