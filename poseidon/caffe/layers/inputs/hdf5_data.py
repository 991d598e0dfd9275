"""HDF5Data: batches of rows of HDF5 files; HDF5Output: an HDF5 file of blobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import h5py
from torch import Tensor

from poseidon.caffe.data.batches.hdf5_rows import RowMaker, RowPlan, read_file_list
from poseidon.caffe.data.batches.numbered import NumberedReader
from poseidon.caffe.layers.base import Layer, LayerError, Shape, check_positive, times
from poseidon.caffe.layers.inputs.sources import ReadingSource
from poseidon.caffe.layers.registry import register
from poseidon.errors import DataError


@register("HDF5Data")
class HDF5Data(ReadingSource):
    """Rows of datasets in the HDF5 files of a list, prepared in the background.

    Each top is the dataset of its name.

    Tops: one or more, N x ... with the shape of the dataset's rows, converted to float.

    Fields (hdf5_data_param): source, the list, a path a line; batch_size N of one worker; shuffle
    (permute the files, and the rows of each file, in each epoch); shared_file_system (true: all
    clients share the rows; false: client k has the list `<source>_k`).
    """

    reader: NumberedReader[RowMaker] | None = None

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        if self.reader is None:
            self.reader = self._open()
        return list(self.reader.maker.shapes)

    def _open(self) -> NumberedReader[RowMaker]:
        param = self.param.hdf5_data_param
        check_positive(param, "batch_size")
        if self.param.HasField("transform_param"):
            raise LayerError("has transform_param, but HDF5Data does not transform its data")
        source = self.source(param)
        plan = RowPlan(
            batch_size=param.batch_size,
            names=tuple(self.param.top),
            share=self.share(param, param.batch_size),
            seed=self.context.seed,
            shuffle=param.shuffle,
        )
        files = [self._file(source, path) for path in read_file_list(source)]
        return NumberedReader(source, RowMaker(files, plan), prefetch=2)

    def _file(self, source: Path, path: str) -> Path:
        """Resolve a path of the list: as a path of the definition, else relative to the list's
        folder.
        """
        found = self.context.resolve(path)
        beside = source.parent / path
        return beside if not found.exists() and beside.exists() else found


@register("HDF5Output")
class HDF5Output(Layer):
    """A writer of its bottoms to the datasets `data` and `label` of a new HDF5 file.

    Bottoms: data, N x ...; label, N x ... . No tops. Every pass appends its rows; Caffe can write
    one batch only.

    Fields (hdf5_output_param): file_name; worker g of several writes `<file_name>_g`.
    """

    BOTTOMS = (2, 2)
    TOPS = (0, 0)
    OPENS_FILES = True
    KEEPS_STATE = True
    NAMES: ClassVar[tuple[str, str]] = ("data", "label")
    _file: h5py.File | None = None

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        name = self.param.hdf5_output_param.file_name
        if not name:
            raise LayerError("missing file_name")
        data, label = bottoms
        if not data or not label or data[0] != label[0]:
            raise LayerError(
                f"bottoms have shapes {times(data)} and {times(label)}, expected the same number "
                "of rows"
            )
        path = self.context.resolve(name)
        self.path = (
            path.with_name(f"{path.name}_{self.context.rank}") if self.context.workers > 1 else path
        )
        if not self.path.parent.is_dir():
            raise LayerError(f"cannot write {self.path}: there is no folder {self.path.parent}")
        return []

    def forward(self, *bottoms: Tensor) -> tuple[Tensor, ...]:
        if self._file is None:
            try:
                self._file = h5py.File(self.path, "w")
            except OSError as error:
                raise DataError(f"cannot write {self.path}: {error}") from error
        for name, bottom in zip(self.NAMES, bottoms, strict=True):
            self._append(self._file, name, bottom.detach().cpu())
        self._file.flush()
        return ()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @staticmethod
    def _append(file: h5py.File, name: str, rows: Tensor) -> None:
        values = rows.numpy()
        if name not in file:
            file.create_dataset(name, data=values, maxshape=(None, *values.shape[1:]))
            return
        dataset = file[name]
        dataset.resize(len(dataset) + len(values), axis=0)
        dataset[-len(values) :] = values
