"""Upgrade of a net's `input`, `input_dim` and `input_shape` to an Input layer.

As Caffe's UpgradeNetInput: one first layer named "input" with a top and a shape for each input. Inputs without any shape,
which old models have, are dropped.
"""

from __future__ import annotations

from poseidon.proto.caffe_pb2 import BlobShape, LayerParameter, NetParameter
from poseidon.proto.upgrade.errors import UpgradeError

_DIMS = 4  # input_dim holds num, channels, height and width of each input


def has_inputs(net: NetParameter) -> bool:
    """Return whether the net names inputs outside of layers."""
    return len(net.input) > 0


def to_input_layer(net: NetParameter) -> NetParameter:
    """Return the net with its inputs as the first layer.

    Raises:
        UpgradeError: the shapes do not match the inputs.
    """
    shapes = _shapes(net)
    upgraded = NetParameter()
    upgraded.CopyFrom(net)
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
                f"{len(net.input_shape)} input_shape given for {inputs} inputs; expected one for each"
            )
        return list(net.input_shape)
    if len(net.input_dim) not in (0, _DIMS * inputs):
        raise UpgradeError(
            f"{len(net.input_dim)} input_dim given for {inputs} inputs; expected {_DIMS} for each"
        )
    dims = list(net.input_dim)
    return [BlobShape(dim=dims[at : at + _DIMS]) for at in range(0, len(dims), _DIMS)]
