"""DenseImageData and ImageSegData: batches of images with a label for each pixel.

From SegNet (Badrinarayanan et al., 2015) and DeepLab (Chen et al., 2015).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from poseidon.caffe.data.batches.dense_images import (
    DenseImageMaker,
    LabelKind,
    Labels,
    Scaling,
    read_pairs,
)
from poseidon.caffe.data.batches.numbered import NumberedReader
from poseidon.caffe.data.batches.transform import STEPS
from poseidon.caffe.layers.base import LayerError, Shape
from poseidon.caffe.layers.inputs.image_data import check_list_param, image_plan
from poseidon.caffe.layers.inputs.sources import ReadingSource
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import (
    DenseImageDataParameter,
    ImageDataParameter,
    TransformationParameter,
)


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
        return NumberedReader(source, DenseImageMaker(source, pairs, plan, labels, scaling))


KINDS = {
    ImageDataParameter.NONE: LabelKind.NONE,
    ImageDataParameter.IMAGE: LabelKind.WHOLE,
    ImageDataParameter.PIXEL: LabelKind.PIXELS,
}


@register("ImageSegData")
class ImageSegData(DenseImageData):
    """Images from a list with a label for each pixel; images that are smaller than the crop are
    extended.

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
