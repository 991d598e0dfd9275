"""Batches of records: Data and AnnotatedData of databases, MemoryData of the caller's arrays,
HDF5Data of rows of HDF5 files; and HDF5Output. AnnotatedData is of SSD (Liu et al., 2016).

Law of MemoryData: batch b since the last `reset` holds records b*K to b*K + K - 1, modulo the number of records.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.caffe.data.batches.hdf5_rows import RowMaker, RowPlan, read_file_list
from poseidon.caffe.data.batches.numbered import NumberedReader
from poseidon.caffe.data.batches.reader import (
    AnnotatedMaker,
    AnnotatedPlan,
    DatumMaker,
    DatumPlan,
    open_maker,
)
from poseidon.caffe.data.boxes import WindowSampler
from poseidon.caffe.data.databases import require
from poseidon.caffe.layers.base import Layer, LayerError, Shape, check_positive, check_shape, times
from poseidon.caffe.layers.registry import register
from poseidon.caffe.layers.sources import ReadingSource, Source
from poseidon.caffe.proto.caffe_pb2 import DataParameter
from poseidon.errors import DataError

# Fields that belong in transform_param; here they would have no effect.
MOVED_FIELDS = ("scale", "mean_file", "crop_size", "mirror")


def check_data_param(param: DataParameter) -> None:
    """Check the fields of a layer that reads a database.

    Raises:
        LayerError: source or batch_size is missing, or a field belongs in transform_param.
    """
    if not param.source:
        raise LayerError("missing source")
    check_positive(param, "batch_size")
    for name in MOVED_FIELDS:
        if param.HasField(name):
            raise LayerError(f"data_param has {name}, which belongs in transform_param")


@register("Data")
class Data(ReadingSource):
    """Images and labels from an LMDB or LevelDB database, prepared in the background.

    Tops: data N x C x H x W, cropped and transformed; optionally label N. With a batch_size of 1,
    and without a crop and a fixed size, data has the size of each record.

    Fields (data_param): source, batch_size N of one worker, backend, rand_skip, prefetch,
    shared_file_system (true: all clients share the records of one database; false: client k has
    `<source>_k`); transform_param.
    """

    TOPS = (1, 2)
    reader: NumberedReader[DatumMaker] | None = None

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.data_param
        if self.reader is None:
            self.reader = self._open()
            self.tops_may_change_shape = not self.reader.maker.plan.has_one_shape
        shape = tuple(int(extent) for extent in self.reader.shape)
        return [shape, (param.batch_size,)][: len(self.param.top)]

    def _open(self) -> NumberedReader[DatumMaker]:
        param = self.param.data_param
        check_data_param(param)
        source = self.source(param)
        require(source)  # before the mean file, which is usually made with the database
        plan = DatumPlan(
            batch_size=param.batch_size,
            transform=self.transform(),
            share=self.share(param, param.batch_size),
            seed=self.context.seed,
            rand_skip=param.rand_skip,
            label=len(self.param.top) > 1,
            force_color=param.force_encoded_color,
            device=self.context.device,
        )
        maker = open_maker(source, param.backend, lambda cursor: DatumMaker(cursor, plan))
        return NumberedReader(source, maker, prefetch=param.prefetch, device=self.context.device)


OBJECT_VALUES = 8


@register("AnnotatedData")
class AnnotatedData(ReadingSource):
    """Images and their objects from a database of AnnotatedDatum, prepared in the background.

    An image is distorted and expanded, a window of it is sampled, and it is resized, given noise,
    cropped and mirrored, as far as the definition says so; its objects follow. Random choices
    depend on the seed and the record's number only.

    Tops: data N x C x H x W; optionally label 1 x 1 x G x 8, a row for each of the G objects of the
    batch: image, label, instance, xmin, ymin, xmax, ymax (fractions of the image), difficult; one
    row of -1 if there is none. Of records without an annotation type: label N.

    Fields: data_param as in Data (source, batch_size, backend, rand_skip, prefetch,
    shared_file_system); transform_param; annotated_data_param: batch_sampler, see
    `poseidon.caffe.data.boxes`; anno_type. label_map_file has no effect.
    """

    TOPS = (1, 2)
    TOPS_MAY_CHANGE_SHAPE = True
    reader: NumberedReader[AnnotatedMaker] | None = None

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        if self.reader is None:
            self.reader = self._open()
        maker = self.reader.maker
        label = (1, 1, maker.objects, OBJECT_VALUES) if maker.has_boxes else maker.shape[:1]
        return [maker.shape, label][: len(self.param.top)]

    def _open(self) -> NumberedReader[AnnotatedMaker]:
        param = self.param.data_param
        check_data_param(param)
        transform = self.transform()
        self.tops_may_change_shape = len(self.param.top) > 1 or not transform.has_fixed_size
        plan = AnnotatedPlan(
            batch_size=param.batch_size,
            transform=transform,
            sampler=WindowSampler(self.param.annotated_data_param.batch_sampler),
            share=self.share(param, param.batch_size),
            seed=self.context.seed,
            rand_skip=param.rand_skip,
            boxes=self.param.annotated_data_param.HasField("anno_type"),
        )
        source = self.source(param)
        maker = open_maker(source, param.backend, lambda cursor: AnnotatedMaker(cursor, plan))
        return NumberedReader(source, maker, prefetch=param.prefetch, device=self.context.device)


@register("MemoryData")
class MemoryData(Source):
    """Records and labels in memory, set by `reset`.

    Tops: data and label.

    Fields (memory_data_param): batch_size, channels, height and width, all positive. As in Caffe,
    the records are not transformed.
    """

    TOPS = (2, 2)
    KEEPS_STATE = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.memory_data_param
        shape = (param.batch_size, param.channels, param.height, param.width)
        if min(shape) < 1:
            raise LayerError(
                f"memory_data_param has batch_size x channels x height x width = {times(shape)}, "
                "expected all four to be positive"
            )
        self.shape = shape
        return [shape, shape[:1]]

    def reset(self, data: npt.NDArray[Any], labels: npt.NDArray[Any]) -> None:
        """Use these records from now on, starting with the first. float32 arrays are not copied.

        Args:
            data: (N, C, H, W), N a positive multiple of the batch size.
            labels: N values.

        Raises:
            LayerError: the shape or the number of records is wrong.
        """
        check_shape("the array of records", data.shape, f"Nx{times(self.shape[1:])}")
        if not len(data) or len(data) % self.shape[0]:
            raise LayerError(
                f"got {len(data)} records, expected a multiple of batch_size {self.shape[0]}"
            )
        if labels.size != len(data):
            raise LayerError(
                f"got {len(data)} records and {labels.size} labels, expected the same number"
            )
        self._data = torch.from_numpy(np.ascontiguousarray(data, np.float32))
        self._labels = torch.from_numpy(np.ascontiguousarray(labels.reshape(-1), np.float32))
        self._position = 0

    def forward(self) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "_data"):
            raise LayerError("has no records; call reset before the first forward pass")
        batch = slice(self._position, self._position + self.shape[0])
        self._position = batch.stop % len(self._data)
        device = self.context.device
        # Copies, so that layers that overwrite a top do not change the caller's arrays.
        return self._data[batch].clone().to(device), self._labels[batch].clone().to(device)


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
        return NumberedReader(source, RowMaker(files, plan), prefetch=2, device=self.context.device)

    def _file(self, source: Path, path: str) -> Path:
        """Resolve a path of the list: as the definition's paths, else relative to the list."""
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
