"""AnnotatedData: batches of a database of images with objects, from SSD (Liu et al., 2016)."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.caffe.data.augment.samplers import WindowSampler
from poseidon.caffe.data.batches.annotated import AnnotatedMaker, AnnotatedPlan
from poseidon.caffe.data.batches.numbered import NumberedReader
from poseidon.caffe.data.batches.reader import open_maker
from poseidon.caffe.layers.base import Shape
from poseidon.caffe.layers.inputs.data import check_data_param
from poseidon.caffe.layers.inputs.sources import ReadingSource
from poseidon.caffe.layers.registry import register

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
