"""Upgrade of V1 layers, `layers { type: CONVOLUTION blobs_lr: 1 }`, to `layer { type: "Convolution"
}`, and of fields that have changed since.

As Caffe's UpgradeV1Net: the settings of each blob (its name in `param`, blob_share_mode, blobs_lr,
weight_decay) become one `param` block for each blob. All other settings keep their names.

Upgrades of fields that have changed within the current layer format.

* Transformation settings, as Caffe's UpgradeNetDataTransformation: scale, mean_file, crop_size and
  mirror move from data_param, image_data_param and window_data_param to transform_param. Caffe does
  so for V1 layers only and ignores these settings in a `layer` block; here they count in both.
* Inputs, as UpgradeNetInput: `input`, `input_dim` and `input_shape` of the net become one first
  layer named "input" with a top and a shape for each input. Inputs without any shape, which old
  models have, are dropped.
* BatchNorm, as UpgradeNetBatchNorm: layers with three `param` blocks, one for each blob of
  statistics, once kept the solver from changing them that way. Now lr_mult and decay_mult are
  always 0.
* The solver's type, from the enum `solver_type` to the string `type`.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

from google.protobuf.message import Message

from poseidon.caffe.proto.caffe_pb2 import (
    BlobShape,
    LayerParameter,
    NetParameter,
    ParamSpec,
    SolverParameter,
    V1LayerParameter,
)


class UpgradeError(ValueError):
    """A definition cannot be upgraded.

    The caller, who knows the file, translates this into a DefinitionError.

    Args:
        layer: index of the layer in `layer` or `layers`; None if the error is about the whole
            definition.
    """

    def __init__(self, message: str, *, layer: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.layer = layer


_TRANSFORMATION = ("scale", "mean_file", "crop_size", "mirror")
_DATA_BLOCKS = ("data_param", "image_data_param", "window_data_param")
_DIMS = 4  # input_dim holds num, channels, height and width of each input
_STATISTICS_BLOBS = 3
_SOLVER_TYPES = {
    SolverParameter.SGD: "SGD",
    SolverParameter.NESTEROV: "Nesterov",
    SolverParameter.ADAGRAD: "AdaGrad",
    SolverParameter.RMSPROP: "RMSProp",
    SolverParameter.ADADELTA: "AdaDelta",
    SolverParameter.ADAM: "Adam",
}


def has_old_transformation(net: NetParameter) -> bool:
    """Return whether any `layer` has a transformation setting in one of the old blocks."""
    return any(True for layer in net.layer for _ in _old_settings(layer))


def move_transformation(net: NetParameter) -> NetParameter:
    """Return the net with every transformation setting in transform_param.

    Raises:
        UpgradeError: a layer has a setting in both blocks, with different values.
    """
    upgraded = deepcopy(net)
    for index, layer in enumerate(upgraded.layer):
        for block_name, block, name, value in list(_old_settings(layer)):
            current = {setting.name: found for setting, found in layer.transform_param.ListFields()}
            if current.get(name, value) != value:
                raise UpgradeError(
                    f"{name} is set in transform_param and, with a different value, in "
                    f"{block_name}; expected it in transform_param alone",
                    layer=index,
                )
            setattr(layer.transform_param, name, value)
            block.ClearField(name)
    return upgraded


def _old_settings(layer: LayerParameter) -> Iterator[tuple[str, Message, str, object]]:
    """Yield each transformation setting in an old block: the block's name, the block, the
    setting, its value.
    """
    for block_setting, block in layer.ListFields():
        if block_setting.name in _DATA_BLOCKS:
            for setting, value in block.ListFields():
                if setting.name in _TRANSFORMATION:
                    yield block_setting.name, block, setting.name, value


def has_inputs(net: NetParameter) -> bool:
    """Return whether the net names inputs outside of layers."""
    return len(net.input) > 0


def to_input_layer(net: NetParameter) -> NetParameter:
    """Return the net with its inputs as the first layer.

    Raises:
        UpgradeError: the shapes do not match the inputs.
    """
    shapes = _shapes(net)
    upgraded = deepcopy(net)
    for name in ("input", "input_shape", "input_dim", "layer"):
        upgraded.ClearField(name)
    if shapes:
        layer = LayerParameter(name="input", type="Input", top=net.input)
        layer.input_param.shape.extend(shapes)
        upgraded.layer.append(layer)
    upgraded.layer.extend(net.layer)
    return upgraded


def _shapes(net: NetParameter) -> list[BlobShape]:
    inputs = len(net.input)
    if net.input_shape and net.input_dim:
        raise UpgradeError("the net has both input_shape and input_dim; expected one of them")
    if net.input_shape:
        if len(net.input_shape) != inputs:
            raise UpgradeError(
                f"{len(net.input_shape)} input_shape given for {inputs} inputs; expected one for "
                "each"
            )
        return list(net.input_shape)
    if len(net.input_dim) not in (0, _DIMS * inputs):
        raise UpgradeError(
            f"{len(net.input_dim)} input_dim given for {inputs} inputs; expected {_DIMS} for each"
        )
    dims = list(net.input_dim)
    return [BlobShape(dim=dims[at : at + _DIMS]) for at in range(0, len(dims), _DIMS)]


def has_batch_norm_params(net: NetParameter) -> bool:
    """Return whether a BatchNorm layer has three `param` blocks, any of them with a multiplier
    other than 0.
    """
    return any(_is_old_batch_norm(layer) for layer in net.layer)


def fix_batch_norm(net: NetParameter) -> NetParameter:
    """Return the net with lr_mult and decay_mult of such layers set to 0."""
    upgraded = deepcopy(net)
    for layer in upgraded.layer:
        if _is_old_batch_norm(layer):
            for param in layer.param:
                param.lr_mult = 0
                param.decay_mult = 0
    return upgraded


def _is_old_batch_norm(layer: LayerParameter) -> bool:
    return (
        layer.type == "BatchNorm"
        and len(layer.param) == _STATISTICS_BLOBS
        and any(param.lr_mult or param.decay_mult for param in layer.param)
    )


def has_solver_type(solver: SolverParameter) -> bool:
    """Return whether the solver has the old enum."""
    return solver.HasField("solver_type")


def to_type(solver: SolverParameter) -> SolverParameter:
    """Return the solver with its type as a string.

    Raises:
        UpgradeError: both fields are set.
    """
    if solver.HasField("type"):
        raise UpgradeError("solver_type and type are both set; expected type alone")
    upgraded = deepcopy(solver)
    upgraded.type = _SOLVER_TYPES[solver.solver_type]
    upgraded.ClearField("solver_type")
    return upgraded


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
