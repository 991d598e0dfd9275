"""Data: batches of a database of Datum records.

AnnotatedData: batches of a database of images with objects, from SSD (Liu et al., 2016).
"""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.caffe.data.augment.samplers import WindowSampler
from poseidon.caffe.data.batches.annotated import AnnotatedMaker, AnnotatedPlan
from poseidon.caffe.data.batches.numbered import NumberedReader
from poseidon.caffe.data.batches.reader import DatumMaker, DatumPlan, open_maker
from poseidon.caffe.data.databases.kinds import require
from poseidon.caffe.layers.base import LayerError, Shape, check_positive
from poseidon.caffe.layers.inputs.sources import ReadingSource
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import DataParameter

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
        )
        maker = open_maker(source, param.backend, lambda cursor: DatumMaker(cursor, plan))
        return NumberedReader(source, maker, prefetch=param.prefetch)


OBJECT_VALUES = 8


@register("AnnotatedData")
class AnnotatedData(ReadingSource):
    """Images and their objects from a database of AnnotatedDatum records, prepared in the
    background.

    An image is distorted and expanded, a window of it is sampled, and it is resized, given noise,
    cropped and mirrored, as far as the definition says so; its objects follow. Random choices
    depend on the seed and the record's number only.

    Tops: data N x C x H x W; optionally label 1 x 1 x G x 8, a row for each of the G objects of the
    batch: image, label, instance, xmin, ymin, xmax, ymax (fractions of the image), difficult; one
    row of -1 if there is none. Of records without an annotation type: label N.

    Fields: data_param as in Data (source, batch_size, backend, rand_skip, prefetch,
    shared_file_system); transform_param; annotated_data_param: batch_sampler, see
    `poseidon.caffe.data.augment.samplers`; anno_type. label_map_file has no effect.
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
        return NumberedReader(source, maker, prefetch=param.prefetch)
