"""Upgrade of transformation settings in data_param, image_data_param and window_data_param.

As Caffe's UpgradeNetDataTransformation: scale, mean_file, crop_size and mirror move to transform_param. Caffe does so for
V1 layers only and ignores these settings in a `layer` block; here they count in both.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message

from poseidon.proto.caffe_pb2 import LayerParameter, NetParameter
from poseidon.proto.upgrade.errors import UpgradeError

_MOVED = ("scale", "mean_file", "crop_size", "mirror")
_BLOCKS = ("data_param", "image_data_param", "window_data_param")


def has_old_transformation(net: NetParameter) -> bool:
    """Return whether any `layer` has a transformation setting in one of the old blocks."""
    return any(True for layer in net.layer for _ in _old_settings(layer))


def move_transformation(net: NetParameter) -> NetParameter:
    """Return the net with every transformation setting in transform_param.

    Raises:
        UpgradeError: a layer has a setting in both blocks, with different values.
    """
    upgraded = NetParameter()
    upgraded.CopyFrom(net)
    for index, layer in enumerate(upgraded.layer):
        for block_name, block, name, value in list(_old_settings(layer)):
            current = {setting.name: found for setting, found in layer.transform_param.ListFields()}
            if current.get(name, value) != value:
                raise UpgradeError(
                    f"{name} is set in transform_param and, with another value, in {block_name}; "
                    "expected it in transform_param alone",
                    layer=index,
                )
            setattr(layer.transform_param, name, value)
            block.ClearField(name)
    return upgraded


def _old_settings(layer: LayerParameter) -> Iterator[tuple[str, Message, str, object]]:
    """Yield each transformation setting in an old block: the block's name, the block, the setting, its value."""
    for block_setting, block in layer.ListFields():
        if block_setting.name in _BLOCKS:
            for setting, value in block.ListFields():
                if setting.name in _MOVED:
                    yield block_setting.name, block, setting.name, value
