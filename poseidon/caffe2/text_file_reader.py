"""Reader of text files whose fields are divided by tabs."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.dataio import Reader
from poseidon.caffe2.schema import Scalar, Struct, data_type_for_dtype


class TextFileReader(Reader):
    """Reads batches of the lines of a text file; the fields are strings and 32-bit floats."""

    def __init__(
        self, init_net: Any, filename: str, schema: Struct, num_passes: int = 1, batch_size: int = 1
    ) -> None:
        """Add to a net the operator that opens the file.

        Args:
            init_net: the net, which runs once.
            filename: the path of the file.
            schema: a record of scalars.
            num_passes: how often the file is read.
            batch_size: the lines of a batch.

        Raises:
            AssertionError: the schema is not a record of scalars.
        """
        assert isinstance(schema, Struct), "Schema must be a schema.Struct"
        assert all(isinstance(child, Scalar) for _, child in schema.get_children()), (
            "Only scalar fields are supported in TextFileReader."
        )
        super().__init__(schema)
        self._batch_size = batch_size
        self._reader = init_net.CreateTextFileReader(
            [],
            filename=str(filename),
            num_passes=num_passes,
            field_types=[data_type_for_dtype(each) for each in schema.field_types()],
        )

    def read(self, read_net: Any) -> tuple[Any, Any]:
        """See `Reader`: the end is where a batch is empty."""
        blobs = read_net.TextFileReaderRead(
            [self._reader], len(self.schema().field_names()), batch_size=self._batch_size
        )
        blobs = [blobs] if isinstance(blobs, core.BlobReference) else list(blobs)
        stop = core.ScopedBlobReference(read_net.NextName("should_stop"))
        return read_net.IsEmpty([blobs[0]], stop), blobs
