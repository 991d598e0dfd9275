"""ImageData: batches of image files from a list."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.caffe.data.batches.images import ImageMaker, ImagePlan, read_list
from poseidon.caffe.data.batches.numbered import NumberedReader
from poseidon.caffe.data.batches.transform import Transform
from poseidon.caffe.layers.base import LayerError, Shape, check_positive
from poseidon.caffe.layers.inputs.sources import ReadingSource
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import DenseImageDataParameter, ImageDataParameter

ListParameter = ImageDataParameter | DenseImageDataParameter


def check_list_param(param: ListParameter) -> None:
    """Check the fields of a layer that reads a list of images.

    Raises:
        LayerError: batch_size is missing, or only one side of the images is given.
    """
    check_positive(param, "batch_size")
    if bool(param.new_height) != bool(param.new_width):
        raise LayerError("has only one of new_height and new_width, expected both or none")


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
    )


@register("ImageData")
class ImageData(ReadingSource):
    """Images and labels from a list, whose lines are a path and an integer; prepared in the
    background.

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
        return NumberedReader(source, ImageMaker(source, read_list(source, root), plan))
