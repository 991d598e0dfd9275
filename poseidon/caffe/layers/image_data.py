"""Batches of images from lists: ImageData, ROIData, WindowData, and with a label for each pixel
DenseImageData of SegNet (Badrinarayanan et al., 2015) and ImageSegData of DeepLab (Chen et al.,
2015).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import numpy as np

from poseidon.caffe.data.batches.claimed_size import MOST_PIXELS
from poseidon.caffe.data.batches.dense_images import (
    DenseImageMaker,
    LabelKind,
    Labels,
    Scaling,
    read_pairs,
)
from poseidon.caffe.data.batches.images import ImageMaker, ImagePlan, read_list
from poseidon.caffe.data.batches.lists import read_windows
from poseidon.caffe.data.batches.numbered import NumberedReader
from poseidon.caffe.data.batches.transform import STEPS, Transform
from poseidon.caffe.data.batches.windows import (
    CHANNELS,
    CropMode,
    Floats,
    ObjectMaker,
    ObjectPlan,
    Sampling,
    WindowMaker,
)
from poseidon.caffe.data.mean import read_mean
from poseidon.caffe.layers.base import LayerError, Shape, check_positive, times
from poseidon.caffe.layers.registry import register
from poseidon.caffe.layers.sources import ReadingSource
from poseidon.caffe.proto.caffe_pb2 import (
    DenseImageDataParameter,
    ImageDataParameter,
    TransformationParameter,
)

ListParameter = ImageDataParameter | DenseImageDataParameter


def check_list_param(param: ListParameter) -> None:
    """Check the fields of a layer that reads a list of images.

    Raises:
        LayerError: batch_size is missing, only one side of the images is given, or both are too large.
    """
    check_positive(param, "batch_size")
    if bool(param.new_height) != bool(param.new_width):
        raise LayerError("has only one of new_height and new_width, expected both or none")
    if param.new_height * param.new_width > MOST_PIXELS:
        raise LayerError(
            f"new_height {param.new_height} and new_width {param.new_width} make "
            f"{param.new_height * param.new_width:,} pixels, expected at most {MOST_PIXELS:,}"
        )


def image_plan(layer: ReadingSource, param: ListParameter, transform: Transform) -> ImagePlan:
    """Return the batches of a list of images that a layer reads."""
    return ImagePlan(
        batch_size=param.batch_size,
        transform=transform,
        share=layer.share(param, param.batch_size),
        seed=layer.context.seed,
        size=(param.new_height, param.new_width) if param.new_height else None,
        color=param.is_color,
        shuffle=param.shuffle,
        rand_skip=param.rand_skip,
        device=layer.context.device,
    )


@register("ImageData")
class ImageData(ReadingSource):
    """Images and labels from a list of paths and integers, prepared in the background.

    Tops: data N x C x H x W, cropped and transformed; label N. Without new_height and new_width,
    and without a crop, the images of a batch must have one size, which the tops get.

    Fields (image_data_param): source, the list; root_folder, the prefix of each path; batch_size N
    of one worker; new_height and new_width; is_color; shuffle (a different order in each epoch, the
    same on all workers); rand_skip; shared_file_system (true: all clients share the lines of one
    list; false: client k has `<source>_k`); transform_param.
    """

    TOPS = (2, 2)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.image_data_param
        if self.reader is None:
            transform = self.transform()
            self.reader = self._open(transform)
            self.tops_may_change_shape = not (param.new_height or transform.has_fixed_size)
        return [self.reader.shape, (param.batch_size,)]

    def _open(self, transform: Transform) -> NumberedReader[ImageMaker]:
        param = self.param.image_data_param
        check_list_param(param)
        source = self.source(param)
        plan = image_plan(self, param, transform)
        root = self.images_root(source, param.root_folder, read_list(source, "", most=1)[0].path)
        return NumberedReader(
            source, ImageMaker(source, read_list(source, root), plan), device=self.context.device
        )


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
        return NumberedReader(file.source, ObjectMaker(file, plan), device=self.context.device)


MODES = {"warp": CropMode.WARP, "square": CropMode.SQUARE}


@register("WindowData")
class WindowData(ReadingSource):
    """Windows drawn at random from a window file (R-CNN, Girshick et al., 2014); see
    `poseidon.caffe.data.batches.windows`.

    Tops: data N x 3 x crop x crop; label N, 0 for background. The first N - floor(N fg_fraction)
    items are background.

    Fields: window_data_param: source; root_folder, the prefix of each path; batch_size N of one
    worker; fg_threshold, bg_threshold, fg_fraction; context_pad; crop_mode, warp or square;
    cache_images; shared_file_system. transform_param: crop_size, mirror, scale, mean_file or
    mean_value.
    """

    TOPS = (2, 2)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        if self.reader is None:
            self.reader = self._open()
        return [self.reader.shape, self.reader.shape[:1]]

    def _open(self) -> NumberedReader[WindowMaker]:
        param, transform = self.param.window_data_param, self.param.transform_param
        check_positive(param, "batch_size")
        check_positive(transform, "crop_size")
        if 2 * param.context_pad >= transform.crop_size:
            raise LayerError(
                f"context_pad is {param.context_pad}, expected less than half of crop_size "
                f"{transform.crop_size}"
            )
        if param.crop_mode not in MODES:
            raise LayerError(f"crop_mode is '{param.crop_mode}', expected {' or '.join(MODES)}")
        if not 0 <= param.fg_fraction <= 1:
            raise LayerError(f"fg_fraction is {param.fg_fraction:g}, expected 0 to 1")
        file = read_windows(
            self.source(param),
            param.root_folder,
            fg_threshold=param.fg_threshold,
            bg_threshold=param.bg_threshold,
        )
        sampling = Sampling(
            batch_size=param.batch_size,
            crop=transform.crop_size,
            # In single precision, as in Caffe.
            foreground=int(np.float32(param.batch_size) * np.float32(param.fg_fraction)),
            context_pad=param.context_pad,
            mode=MODES[param.crop_mode],
            mirror=transform.mirror,
            scale=transform.scale,
            mean=self._mean(),
            cache=param.cache_images,
            share=self.share(param, param.batch_size),
            seed=self.context.seed,
        )
        return NumberedReader(file.source, WindowMaker(file, sampling), device=self.context.device)

    def _mean(self) -> Floats | None:
        param = self.param.transform_param
        if param.HasField("mean_file") and param.mean_value:
            raise LayerError(
                "transform_param has both mean_file and mean_value, expected one of them"
            )
        if param.HasField("mean_file"):
            mean = read_mean(self.context.resolve(param.mean_file))
            if (
                mean.shape[0] != CHANNELS
                or mean.shape[1] != mean.shape[2]
                or mean.shape[1] < param.crop_size
            ):
                raise LayerError(
                    f"mean_file is {times(mean.shape)}, expected a square image of {CHANNELS} "
                    f"channels and an extent of at least {param.crop_size}"
                )
            return mean
        return self.channel_mean()


@register("DenseImageData")
class DenseImageData(ReadingSource):
    """Images and label images from a list, whose lines are two paths; prepared in the background.

    Tops: data N x C x H x W, cropped and transformed; labels N x 1 x H x W, the values of the label
    images, cropped and mirrored like the data. Without new_height and new_width, and without a
    crop, the images of a batch must have one size.

    Fields (dense_image_data_param): source, the list; root_folder, the prefix of each path;
    batch_size N of one worker; new_height and new_width (label images: the nearest neighbour);
    is_color; shuffle; rand_skip; mean_file, in place of transform_param's; shared_file_system
    (as for `ImageData`); transform_param, with DeepLab's scale_factors: the size of each image and
    of its labels is multiplied by one of them, drawn at random, before the crop.
    """

    TOPS = (2, 2)

    @property
    def settings(self) -> DenseImageDataParameter | ImageDataParameter:
        """The layer's own block."""
        return self.param.dense_image_data_param

    @property
    def labels(self) -> Labels:
        """Where the labels come from."""
        return Labels()

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.settings
        if self.reader is None:
            self.reader = self._open()
            transform = self.param.transform_param
            resized = param.new_height and not transform.scale_factors
            cropped = transform.crop_size or transform.HasField("crop_h")
            self.tops_may_change_shape = not (resized or cropped)
        shape = self.reader.shape
        return [shape, (shape[0], 1, *shape[2:]), (shape[0], 1, 1, 2)][: len(self.param.top)]

    def own_transform(self) -> TransformationParameter:
        """Return a copy of the transformation, with the mean file of the layer's own block.

        Raises:
            LayerError: there are two mean files.
        """
        transform, param = deepcopy(self.param.transform_param), self.settings
        if param.HasField("mean_file"):
            if transform.HasField("mean_file"):
                raise LayerError(
                    "has mean_file in dense_image_data_param and in transform_param, expected one "
                    "of them"
                )
            transform.mean_file = param.mean_file
        return transform

    def _open(self) -> NumberedReader[DenseImageMaker]:
        param, labels = self.settings, self.labels
        check_list_param(param)
        for name in STEPS:
            if self.param.transform_param.HasField(name):
                raise LayerError(
                    f"transform_param has {name}, which would not change the labels; leave it out"
                )
        transform = self.own_transform()
        scaling = Scaling(factors=tuple(transform.scale_factors), seed=self.context.seed)
        del transform.scale_factors[:]
        source = self.source(param)
        plan = image_plan(self, param, self.transform(transform))
        first = read_pairs(source, "", kind=labels.kind, most=1)[0].image
        root = self.images_root(source, param.root_folder, first)
        pairs = read_pairs(source, root, kind=labels.kind)
        return NumberedReader(
            source,
            DenseImageMaker(source, pairs, plan, labels, scaling),
            device=self.context.device,
        )


KINDS = {
    ImageDataParameter.NONE: LabelKind.NONE,
    ImageDataParameter.IMAGE: LabelKind.WHOLE,
    ImageDataParameter.PIXEL: LabelKind.PIXELS,
}


@register("ImageSegData")
class ImageSegData(DenseImageData):
    """Images with a label for each pixel, from a list; images below the crop are extended.

    A line of the list is the path of an image and, as label_type says, of its label image (PIXEL),
    a label for all its pixels (IMAGE), or nothing (NONE: all pixels have ignore_label). An image
    that is smaller than the crop gets rows below and columns on the right, of the mean in the image
    and of ignore_label in the labels.

    Tops: data N x C x H x W and labels N x 1 x H x W, as for `DenseImageData`; extents N x 1 x 1 x
    2, which may be left out: height and width of each image, scaled, before it is extended, at most
    H and W.

    Fields (image_data_param): as for `ImageData`; label_type (IMAGE); ignore_label (255);
    transform_param, without mean_file. Label images are resized by the nearest neighbour; DeepLab
    interpolates them.
    """

    TOPS = (2, 3)

    @property
    def settings(self) -> ImageDataParameter:
        """The layer's own block."""
        return self.param.image_data_param

    @property
    def labels(self) -> Labels:
        """Where the labels come from."""
        param = self.settings
        return Labels(kind=KINDS[param.label_type], ignored=param.ignore_label, pads=True)

    def own_transform(self) -> TransformationParameter:
        if self.param.transform_param.HasField("mean_file"):
            raise LayerError(
                "transform_param has mean_file, expected mean_value: images differ in size"
            )
        return deepcopy(self.param.transform_param)
