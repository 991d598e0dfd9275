"""Random inputs in place of a net's data, which is not available.

Law: whatever reads files gives way to an Input layer of the same tops in the shapes that its data
had: pictures as large as the definition crops or resizes them, else as its data set has them; two
at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import LayerParameter
from poseidon.caffe.proto.definition import NetDefinition

READERS = frozenset({"Data", "ImageData", "HDF5Data", "MemoryData", "WindowData"})
RECORDS = 2
# What a word in a definition says about records of its data set: channels and side.
DATA_SETS = {"siamese": (2, 28), "mnist": (1, 28), "lenet": (1, 28), "cifar": (3, 32)}
IMAGENET = (3, 224)
# Of the fully convolutional nets, which read whole photographs: the side, and the channels by the
# tops' names.
PHOTOGRAPH_SIDE = 32
CHANNELS = {"data": 3, "color": 3, "hha": 3, "depth": 1}
HDF5_FEATURES = 4
# Of the nets that look at regions: four of them, of twenty classes and background.
REGIONS = {"rois": (4, 5), "labels": (4,)} | {
    f"bbox_{name}": (4, 84) for name in ("targets", "inside_weights", "outside_weights")
}
# Of the nets that propose regions: one picture, its size and scale, and objects: corners and class.
PROPOSING = {"data": (1, 3, 96, 128), "im_info": (1, 3), "gt_boxes": (2, 5)}
IM_INFO = (96.0, 128.0, 1.0)
GT_BOXES = ((8.0, 8.0, 71.0, 71.0, 3.0), (40.0, 20.0, 119.0, 79.0, 7.0))
REGION = (0.0, 0.0, 0.0, 31.0, 47.0)


def with_random_inputs(definition: NetDefinition) -> tuple[NetDefinition, tuple[str, ...]]:
    """Return the definition without data readers, and the types of the replaced layers."""
    changed = definition.with_layers(range(len(definition.param.layer)))
    replaced = []
    for layer in changed.param.layer:
        if layer.type in READERS or (layer.type == "Python" and not layer.bottom):
            replaced.append(layer.type)
            shapes = _shapes(layer, definition)
            layer.type = "Input"
            del layer.input_param.shape[:]
            for shape in shapes:
                layer.input_param.shape.add(dim=shape)
        elif layer.type == "Input":
            for blob in layer.input_param.shape:
                if len(blob.dim) == 4:
                    blob.dim[0] = min(blob.dim[0], RECORDS)
    return changed, tuple(dict.fromkeys(replaced))


def random_inputs(net: Net) -> dict[str, Tensor]:
    """Return normal noise for a net's inputs, 0 and 1 for labels, one region for all, and
    objects.
    """
    generator = torch.Generator().manual_seed(1)
    return {name: _input(name, shape, generator) for name, shape in net.input_shapes.items()}


def _input(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name in ("im_info", "gt_boxes"):
        return torch.tensor([IM_INFO] if name == "im_info" else GT_BOXES)
    if name == "rois":
        return torch.tensor([REGION]).expand(shape).clone()
    if name in CHANNELS or "data" in name or (len(shape) > 1 and shape[1] != 1):
        return torch.randn(shape, generator=generator)
    return torch.randint(2, shape, generator=generator).float()


def _shapes(layer: LayerParameter, definition: NetDefinition) -> list[tuple[int, ...]]:
    if layer.type == "HDF5Data":
        return [(RECORDS, HDF5_FEATURES), *[(RECORDS,)] * (len(layer.top) - 1)]
    if layer.type == "Python":
        side = PHOTOGRAPH_SIDE
        regions = REGIONS if "rois" in layer.top else PROPOSING if "gt_boxes" in layer.top else {}
        return [regions.get(top, (1, CHANNELS.get(top, 1), side, side)) for top in layer.top]
    channels, side = _data_set(layer, definition)
    side = layer.transform_param.crop_size or layer.image_data_param.new_height or side
    return [(RECORDS, channels, side, side), *[(RECORDS,)] * (len(layer.top) - 1)]


def _data_set(layer: LayerParameter, definition: NetDefinition) -> tuple[int, int]:
    words = f"{layer.data_param.source} {definition.param.name} {definition.source}".lower()
    return next((size for word, size in DATA_SETS.items() if word in words), IMAGENET)
