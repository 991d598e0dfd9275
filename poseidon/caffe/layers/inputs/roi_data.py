"""ROIData: images with the boxes of their objects, for Faster R-CNN and R-FCN."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.caffe.data.batches.numbered import NumberedReader
from poseidon.caffe.data.batches.objects import ObjectMaker, ObjectPlan
from poseidon.caffe.data.batches.window_file import read_windows
from poseidon.caffe.layers.base import LayerError, Shape
from poseidon.caffe.layers.inputs.sources import ReadingSource
from poseidon.caffe.layers.registry import register

REGION = 5


@register("ROIData")
class ROIData(ReadingSource):
    """One image and the boxes of its objects, from a window file; in place of
    py-faster-rcnn's Python layer RoIDataLayer.

    Tops: data 1 x 3 x H x W, whose size changes from image to image; im_info 1 x 3: H, W and the
    factor of the image's sides; gt_boxes G x 5: x1, y1, x2, y2 in pixels of data, and the class,
    from 1.

    Fields: roi_data_param: source, a window file as for `WindowData`, whose windows of overlap 1
    are the objects; root_folder, the prefix of each path; scale, the length of the shorter side (0:
    images stay as they are); max_size, the limit of the longer one; shuffle (a different order in
    each epoch, the same on all workers); shared_file_system (as for `ImageData`). transform_param:
    mean_value, scale, mirror.
    """

    TOPS = (3, 3)
    TOPS_MAY_CHANGE_SHAPE = True
    reader: NumberedReader[ObjectMaker] | None = None

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        if self.reader is None:
            self.reader = self._open()
        return [self.reader.shape, (1, 3), (self.reader.maker.objects, REGION)]

    def _open(self) -> NumberedReader[ObjectMaker]:
        param, transform = self.param.roi_data_param, self.param.transform_param
        if param.scale and param.max_size < 1:
            raise LayerError("max_size is 0, expected at least 1")
        for field, _ in transform.ListFields():
            if field.name not in ("mean_value", "scale", "mirror"):
                raise LayerError(
                    f"transform_param has {field.name}, expected only mean_value, scale and mirror"
                )
        file = read_windows(
            self.source(param),
            param.root_folder,
            fg_threshold=1.0,
            bg_threshold=0.0,
        )
        plan = ObjectPlan(
            share=self.share(param, 1),
            seed=self.context.seed,
            scale=param.scale,
            longest=param.max_size,
            mean=self.channel_mean(),
            factor=transform.scale,
            mirror=transform.mirror,
            shuffle=param.shuffle,
        )
        return NumberedReader(file.source, ObjectMaker(file, plan))
