"""V1 layers, `layers { type: CONVOLUTION blobs_lr: 1 }`, to today's `layer { type: "Convolution" }`.

As Caffe's UpgradeV1Net: the settings of each blob (its name in `param`, blob_share_mode, blobs_lr,
weight_decay) become one `param` block for each blob; all other settings keep their names.
"""

from __future__ import annotations

from poseidon.proto.caffe_pb2 import LayerParameter, NetParameter, ParamSpec, V1LayerParameter
from poseidon.proto.upgrade.errors import UpgradeError

# Where today's name is more than the words of the old one, each with a capital.
_TYPE_WORDS = {
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
# V1's setting of each blob, and the ParamSpec field that says it today.
_BLOB_SETTINGS = {
    "param": "name",
    "blob_share_mode": "share_mode",
    "blobs_lr": "lr_mult",
    "weight_decay": "decay_mult",
}


def is_v1(net: NetParameter) -> bool:
    """Whether the net has layers in the V1 grammar."""
    return len(net.layers) > 0


def from_v1(net: NetParameter) -> NetParameter:
    """The net with every V1 layer in today's grammar.

    Raises:
        UpgradeError: it has layers of both grammars.
    """
    if net.layer:
        raise UpgradeError("the net mixes `layers` blocks with `layer` blocks; expected one kind")
    upgraded = NetParameter()
    upgraded.CopyFrom(net)
    del upgraded.layers[:]
    upgraded.layer.extend(_layer(old) for old in net.layers)
    return upgraded


def type_name(type_: V1LayerParameter.LayerType) -> str:
    """Today's name of a V1 layer type; the empty string for NONE."""
    return todays_name(V1LayerParameter.LayerType.Name(type_))


def todays_name(name: str) -> str:
    """Today's name of a V1 layer type that is given by its own, SOFTMAX_LOSS; the empty string for what is none."""
    if name not in V1LayerParameter.LayerType.DESCRIPTOR.values_by_name:
        return ""
    return _TYPE_WORDS.get(name, "".join(word.capitalize() for word in name.split("_")))


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
