"""Upgrade of V1 layers, `layers { type: CONVOLUTION blobs_lr: 1 }`, to `layer { type:
"Convolution" }`.

As Caffe's UpgradeV1Net: the settings of each blob (its name in `param`, blob_share_mode, blobs_lr,
weight_decay) become one `param` block for each blob. All other settings keep their names.
"""

from __future__ import annotations

from copy import deepcopy

from poseidon.caffe.proto.caffe_pb2 import LayerParameter, NetParameter, ParamSpec, V1LayerParameter
from poseidon.caffe.proto.upgrade.errors import UpgradeError

# The current names that are not the capitalized words of the old one.
_IRREGULAR_NAMES = {
    "ABSVAL": "AbsVal",
    "ARGMAX": "ArgMax",
    "BNLL": "BNLL",
    "HDF5_DATA": "HDF5Data",
    "HDF5_OUTPUT": "HDF5Output",
    "LRN": "LRN",
    "MVN": "MVN",
    "NONE": "",
    "RELU": "ReLU",
    "SOFTMAX_LOSS": "SoftmaxWithLoss",
    "TANH": "TanH",
}
# V1's settings of each blob, and the current ParamSpec fields.
_BLOB_SETTINGS = {
    "param": "name",
    "blob_share_mode": "share_mode",
    "blobs_lr": "lr_mult",
    "weight_decay": "decay_mult",
}


def is_v1(net: NetParameter) -> bool:
    """Return whether the net has layers in the V1 format."""
    return len(net.layers) > 0


def from_v1(net: NetParameter) -> NetParameter:
    """Return the net with every V1 layer in the current format.

    Raises:
        UpgradeError: the net has layers of both formats.
    """
    if net.layer:
        raise UpgradeError("the net mixes `layers` blocks with `layer` blocks; expected one kind")
    upgraded = deepcopy(net)
    del upgraded.layers[:]
    upgraded.layer.extend(_layer(old) for old in net.layers)
    return upgraded


def type_name(type_: V1LayerParameter.LayerType) -> str:
    """Return the current name of a V1 layer type; the empty string for NONE."""
    return current_name(V1LayerParameter.LayerType.Name(type_))


def current_name(name: str) -> str:
    """Return the current name of a V1 layer type such as SOFTMAX_LOSS; the empty string for an
    unknown one.
    """
    if name not in V1LayerParameter.LayerType.DESCRIPTOR.values_by_name:
        return ""
    return _IRREGULAR_NAMES.get(name, "".join(word.capitalize() for word in name.split("_")))


def _layer(old: V1LayerParameter) -> LayerParameter:
    layer = LayerParameter(type=type_name(old.type))
    for setting, value in old.ListFields():
        name = setting.name
        if name in _BLOB_SETTINGS:
            for index, item in enumerate(value):
                setattr(_param(layer, index), _BLOB_SETTINGS[name], item)
        elif name == "type":
            continue
        elif setting.is_repeated:
            getattr(layer, name).extend(value)
        elif setting.message_type is not None:
            getattr(layer, name).CopyFrom(value)
        else:
            setattr(layer, name, value)
    return layer


def _param(layer: LayerParameter, index: int) -> ParamSpec:
    while len(layer.param) <= index:
        layer.param.add()
    return layer.param[index]
