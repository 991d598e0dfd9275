"""Data sets in memory: records with a schema, whose columns are blobs, with readers and writers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.dataio import Reader, Writer
from poseidon.caffe2.schema import Field, InitEmptyRecord, Struct, from_blob_list, from_column_list


class _CursorReader(Reader):
    """The common parts of a data set's readers: its content, and a cursor made once at most."""

    def __init__(
        self,
        dataset: Dataset,
        name: str | None,
        batch_size: int = 1,
        enforce_batch_size: bool = False,
    ) -> None:
        super().__init__(dataset.content())
        self.dataset = dataset
        self.name = name or f"{dataset.name}_cursor"
        self.cursor: Any = None
        self.batch_size = batch_size
        self.enforce_batch_size = enforce_batch_size

    def setup_ex(self, init_net: Any, finish_net: Any) -> None:
        if self.cursor is None:
            name = init_net.NextScopedBlob(self.name)
            self.cursor = init_net.CreateTreeCursor([], name, fields=self.dataset.fields)

    def reset(self, net: Any) -> None:
        net.ResetCursor([self.cursor], [])

    def _read(self, net: Any, operator: str, inputs: list[Any], **kwargs: Any) -> tuple[Any, Any]:
        """Add the operator that reads a batch; the end is where one is empty."""
        assert self.cursor is not None, "setup not called."
        content = self.dataset.content()
        with core.NameScope(net.NextName(self.name)):
            fields = getattr(net, operator)(
                [self.cursor, *inputs, *content.field_blobs()],
                content.field_names(),
                batch_size=self.batch_size,
                enforce_batch_size=self.enforce_batch_size,
                **kwargs,
            )
            fields = [fields] if isinstance(fields, core.BlobReference) else list(fields)
            return net.IsEmpty([fields[0]]), fields


class _DatasetReader(_CursorReader):
    def read(self, read_net: Any) -> tuple[Any, Any]:
        return self._read(read_net, "ReadNextBatch", [])


class _DatasetRandomReader(_CursorReader):
    def __init__(
        self,
        dataset: Dataset,
        name: str | None,
        indices: Any,
        batch_size: int = 1,
        loop_over: bool = False,
        enforce_batch_size: bool = False,
    ) -> None:
        super().__init__(dataset, name, batch_size, enforce_batch_size)
        self.indices = indices
        self.offsets: Any = None
        self.loop_over = loop_over

    def computeoffset(self, net: Any) -> None:
        """Add the operator that finds where records begin; it runs before the first read."""
        self.reset(net)
        self.offsets = net.ComputeOffset(
            [self.cursor, *self.dataset.content().field_blobs()], "offsets"
        )

    def sort_and_shuffle(
        self, net: Any, sort_by_field: str | None = None, shuffle_size: int = 1, batch_size: int = 1
    ) -> None:
        """Add to a net the operator that makes the order.

        Args:
            net: the net.
            sort_by_field: the field that records are sorted by.
            shuffle_size: batches among which sorted records are shuffled.
            batch_size: records in a batch; whole batches are shuffled in the end.
        """
        names = self.dataset.field_names()
        assert not sort_by_field or sort_by_field in names, f"{sort_by_field} is not in {names}"
        self.reset(net)
        self.indices = net.SortAndShuffle(
            [self.cursor, *self.dataset.content().field_blobs()],
            "indices",
            sort_by_field_idx=names.index(sort_by_field) if sort_by_field else -1,
            shuffle_size=shuffle_size,
            batch_size=batch_size,
        )

    def read(self, read_net: Any) -> tuple[Any, Any]:
        inputs = [self.indices, self.offsets]
        return self._read(read_net, "ReadRandomBatch", inputs, loop_over=self.loop_over)


class _DatasetWriter(Writer):
    def __init__(self, content: Field) -> None:
        self._content = content
        self.mutex: Any = None

    def setup_ex(self, init_net: Any, finish_net: Any) -> None:
        if self.mutex is None:
            self.mutex = init_net.CreateMutex([])

    def write(self, writer_net: Any, fields: Any) -> None:
        """See `Writer`: the batch is checked against the schema first."""
        assert self.mutex is not None, "setup not called."
        blobs = self._content.field_blobs()
        assert len(fields) == len(blobs), f"Expected {len(blobs)} fields, got {len(fields)}."
        writer_net.CheckDatasetConsistency(fields, [], fields=self._content.field_names())
        writer_net.AtomicAppend([self.mutex, *blobs, *fields], blobs)


def Const(net: Any, value: Any, dtype: Any = None, name: str | None = None) -> Any:
    """Feed a value to a new blob, and return the blob as an external input of a net."""
    assert isinstance(net, core.Net), "net must be a core.Net instance."
    blob = net.AddExternalInput(net.NextName(prefix=name))
    workspace.FeedBlob(str(blob), np.array(value, dtype=dtype))
    return blob


def execution_step_with_progress(name: str, init_net: Any, substeps: Any, rows_read: Any) -> Any:
    """Return a step that prints the number of rows every five seconds."""
    report_net = core.Net("report_net")
    report_net.Print([rows_read], [])
    return core.execution_step(
        name, substeps, report_net=report_net, concurrent_substeps=True, report_interval=5
    )


class Dataset:
    """Records in memory: their columns are blobs of a workspace."""

    def __init__(self, fields: Any, name: str | None = None) -> None:
        """Make a data set of a schema; a record's blobs are its content.

        Args:
            fields: a record, or the names of columns.
            name: before the names of what belongs to it; by default "dataset".
        """
        assert isinstance(fields, (list, Struct)), "fields must be a Struct or a list of names"
        if isinstance(fields, list):
            fields = from_column_list(fields)
        self.schema = fields
        self.fields = fields.field_names()
        self._field_types = fields.field_types()
        self.name = name or "dataset"
        self.field_blobs: list[Any] | None = fields.field_blobs() if fields.has_blobs() else None

    def trim(self, net: Any, multiple_of: int) -> None:
        """Add the operator that drops the last records, so that their number is a multiple."""
        net.TrimDataset(self._blobs(), self._blobs(), fields=self.fields, multiple_of=multiple_of)

    def init_empty(self, init_net: Any) -> None:
        """Let a net make new, empty blobs for the columns; a record given with blobs keeps them."""
        self.field_blobs = InitEmptyRecord(init_net, self.schema.clone_schema()).field_blobs()

    def init_from_dataframe(self, net: Any, dataframe: Any) -> None:
        """Feed the columns of a pandas data frame, which become external inputs of a net."""
        assert len(self.fields) == len(dataframe.columns)
        self.field_blobs = [
            Const(net, dataframe.iloc[:, column].to_numpy(), name=field)
            for column, field in enumerate(self.fields)
        ]

    def _blobs(self) -> list[Any]:
        assert self.field_blobs, "Dataset not initialized."
        return self.field_blobs

    def get_blobs(self) -> list[Any] | None:
        return self.field_blobs

    def content(self) -> Any:
        return from_blob_list(self.schema, self._blobs())

    def field_names(self) -> list[str]:
        return self.fields  # type: ignore[no-any-return]

    def field_types(self) -> Sequence[Any]:
        return self._field_types  # type: ignore[no-any-return]

    def reader(
        self,
        init_net: Any = None,
        cursor_name: str | None = None,
        batch_size: int = 1,
        enforce_batch_size: bool = False,
    ) -> _DatasetReader:
        """Return a reader; nothing may be appended while it reads.

        Args:
            init_net: makes its cursor; by default the task that reads does, each time.
            cursor_name: of the cursor's blob.
            batch_size: records in a batch.
            enforce_batch_size: whether a last, smaller batch is left out.
        """
        reader = _DatasetReader(self, cursor_name, batch_size, enforce_batch_size)
        if init_net is not None:
            reader.setup_ex(init_net, None)
        return reader

    def random_reader(
        self,
        init_net: Any = None,
        indices: Any = None,
        cursor_name: str | None = None,
        batch_size: int = 1,
        loop_over: bool = False,
        enforce_batch_size: bool = False,
    ) -> _DatasetRandomReader:
        """Return a reader that follows an order.

        Args:
            init_net, cursor_name, batch_size, enforce_batch_size: see `reader`.
            indices: the blob of the order; `sort_and_shuffle` makes one.
            loop_over: whether it begins again at its end.
        """
        reader = _DatasetRandomReader(
            self, cursor_name, indices, batch_size, loop_over, enforce_batch_size
        )
        if init_net is not None:
            reader.setup_ex(init_net, None)
        return reader

    def writer(self, init_net: Any = None) -> _DatasetWriter:
        """Return a writer; `init_net` makes what it needs, by default the task that writes does."""
        writer = _DatasetWriter(self.content())
        if init_net is not None:
            writer.setup_ex(init_net, None)
        return writer
