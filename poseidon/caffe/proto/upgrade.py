"""Upgrades of old definition formats to the current one, as Caffe's upgrade_proto, in its order.

Laws: each upgrade is a predicate and a transformation, which takes a definition and returns a new
one, without side effects. A current definition is returned unchanged; upgrading twice equals
upgrading once.

The formats: V0 (`layers { layer { type: "conv" } }`), V1 (`layers { type: CONVOLUTION }`),
transformation settings inside data_param, `input` and `input_dim` of a net, BatchNorm's three
`param` blocks, and solver_type. V0 is upgraded here, the others in `upgrade_v1`.

Upgrade of V0, `layers { layer { type: "conv" kernelsize: 5 } bottom: "data" }`, to V1, as Caffe's
UpgradeV0Net: V0 had the settings of all types in one message; `_FIELDS` has the V1 field
of each setting, by layer type. Padding was a layer, and becomes the `pad` of the layer that reads
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from poseidon.caffe.proto.caffe_pb2 import (
    NetParameter,
    PoolingParameter,
    SolverParameter,
    V0LayerParameter,
    V1LayerParameter,
)
from poseidon.caffe.proto.upgrade_v1 import (
    UpgradeError,
    fix_batch_norm,
    from_v1,
    has_batch_norm_params,
    has_inputs,
    has_old_transformation,
    has_solver_type,
    is_v1,
    move_transformation,
    to_input_layer,
    to_type,
)

PADDING = "padding"

_TYPES = {
    "accuracy": V1LayerParameter.ACCURACY,
    "bnll": V1LayerParameter.BNLL,
    "concat": V1LayerParameter.CONCAT,
    "conv": V1LayerParameter.CONVOLUTION,
    "data": V1LayerParameter.DATA,
    "dropout": V1LayerParameter.DROPOUT,
    "euclidean_loss": V1LayerParameter.EUCLIDEAN_LOSS,
    "flatten": V1LayerParameter.FLATTEN,
    "hdf5_data": V1LayerParameter.HDF5_DATA,
    "hdf5_output": V1LayerParameter.HDF5_OUTPUT,
    "im2col": V1LayerParameter.IM2COL,
    "images": V1LayerParameter.IMAGE_DATA,
    "infogain_loss": V1LayerParameter.INFOGAIN_LOSS,
    "innerproduct": V1LayerParameter.INNER_PRODUCT,
    "lrn": V1LayerParameter.LRN,
    "multinomial_logistic_loss": V1LayerParameter.MULTINOMIAL_LOGISTIC_LOSS,
    "pool": V1LayerParameter.POOLING,
    "relu": V1LayerParameter.RELU,
    "sigmoid": V1LayerParameter.SIGMOID,
    "softmax": V1LayerParameter.SOFTMAX,
    "softmax_loss": V1LayerParameter.SOFTMAX_LOSS,
    "split": V1LayerParameter.SPLIT,
    "tanh": V1LayerParameter.TANH,
    "window_data": V1LayerParameter.WINDOW_DATA,
}

_CONV, _POOL, _IP, _LRN = "convolution_param", "pooling_param", "inner_product_param", "lrn_param"
_DATA, _HDF5, _IMAGES = "data_param", "hdf5_data_param", "image_data_param"
_WINDOWS = "window_data_param"
_LEARNED = {"conv": _CONV, "innerproduct": _IP}
_ANY = "any type"


def _each(name: str, blocks: Mapping[str, str]) -> dict[str, str]:
    """Map each layer type to the field `name` of its block."""
    return {type_: f"{block}.{name}" for type_, block in blocks.items()}


# V0's setting: the types that have it, with its path in V1.
_FIELDS: dict[str, dict[str, str]] = {
    "name": {_ANY: "name"},
    "blobs": {_ANY: "blobs"},
    "blobs_lr": {_ANY: "blobs_lr"},
    "weight_decay": {_ANY: "weight_decay"},
    "num_output": _each("num_output", _LEARNED),
    "biasterm": _each("bias_term", _LEARNED),
    "weight_filler": _each("weight_filler", _LEARNED),
    "bias_filler": _each("bias_filler", _LEARNED),
    "pad": _each("pad", {"conv": _CONV, "pool": _POOL}),
    "kernelsize": _each("kernel_size", {"conv": _CONV, "pool": _POOL}),
    "stride": _each("stride", {"conv": _CONV, "pool": _POOL}),
    "group": _each("group", {"conv": _CONV}),
    "pool": _each("pool", {"pool": _POOL}),
    "dropout_ratio": {"dropout": "dropout_param.dropout_ratio"},
    "local_size": _each("local_size", {"lrn": _LRN}),
    "alpha": _each("alpha", {"lrn": _LRN}),
    "beta": _each("beta", {"lrn": _LRN}),
    "k": _each("k", {"lrn": _LRN}),
    "source": _each(
        "source",
        {
            "data": _DATA,
            "hdf5_data": _HDF5,
            "images": _IMAGES,
            "window_data": _WINDOWS,
            "infogain_loss": "infogain_loss_param",
        },
    ),
    "scale": {_ANY: "transform_param.scale"},
    "meanfile": {_ANY: "transform_param.mean_file"},
    "cropsize": {_ANY: "transform_param.crop_size"},
    "mirror": {_ANY: "transform_param.mirror"},
    "batchsize": _each(
        "batch_size",
        {"data": _DATA, "hdf5_data": _HDF5, "images": _IMAGES, "window_data": _WINDOWS},
    ),
    "rand_skip": _each("rand_skip", {"data": _DATA, "images": _IMAGES}),
    "shuffle_images": _each("shuffle", {"images": _IMAGES}),
    "new_height": _each("new_height", {"images": _IMAGES}),
    "new_width": _each("new_width", {"images": _IMAGES}),
    "concat_dim": _each("concat_dim", {"concat": "concat_param"}),
    "det_fg_threshold": _each("fg_threshold", {"window_data": _WINDOWS}),
    "det_bg_threshold": _each("bg_threshold", {"window_data": _WINDOWS}),
    "det_fg_fraction": _each("fg_fraction", {"window_data": _WINDOWS}),
    "det_context_pad": _each("context_pad", {"window_data": _WINDOWS}),
    "det_crop_mode": _each("crop_mode", {"window_data": _WINDOWS}),
    "hdf5_output_param": {"hdf5_output": "hdf5_output_param"},
}


def is_v0(net: NetParameter) -> bool:
    """Return whether any layer has the V0 format."""
    return any(layer.HasField("layer") for layer in net.layers)


def kept_layers(net: NetParameter) -> list[int]:
    """Return the indices of the layers of a V0 net that remain: all but padding."""
    return [index for index, layer in enumerate(net.layers) if layer.layer.type != PADDING]


def from_v0(net: NetParameter) -> NetParameter:
    """Return the net with every V0 layer in the V1 format and without padding layers.

    A setting that V0 does not define for a layer type is dropped, as in Caffe; `dropped_settings`
    lists such settings.

    Raises:
        UpgradeError: a type that V0 does not have, or a padding layer that no convolution or
            pooling reads.
    """
    upgraded = deepcopy(net)
    del upgraded.layers[:]
    # The padding layer that produced each blob, as of the current layer.
    paddings: dict[str, V1LayerParameter] = {}
    for index, old in enumerate(net.layers):
        if old.layer.type == PADDING:
            if len(old.bottom) != 1 or len(old.top) != 1:
                raise UpgradeError("a padding layer has one bottom and one top", layer=index)
            paddings[old.top[0]] = old
            continue
        new = upgraded.layers.add()
        if old.HasField("layer"):
            new.bottom.extend(old.bottom)
            new.top.extend(old.top)
            _fill(new, old.layer, index)
        else:
            new.CopyFrom(old)
        _fold(new, old, paddings, index)
        for name in old.top:
            paddings.pop(name, None)
    return upgraded


def dropped_settings(net: NetParameter) -> list[tuple[int, str]]:
    """Return the settings of a V0 net that its upgrade drops, each as the index of the layer and
    a message.
    """
    found = []
    for index, layer in enumerate(net.layers):
        for field, _ in layer.layer.ListFields():
            paths = _FIELDS.get(field.name, {})
            known = field.name == "type" or layer.layer.type == PADDING
            if not (known or _ANY in paths or layer.layer.type in paths):
                found.append(
                    (
                        index,
                        f"{field.name} is not a setting of a '{layer.layer.type}' layer of "
                        "Caffe's first format (V0); ignored",
                    )
                )
    return found


def _fold(
    new: V1LayerParameter,
    old: V1LayerParameter,
    paddings: Mapping[str, V1LayerParameter],
    index: int,
) -> None:
    """Set the pad of a layer that reads a padding layer's blob."""
    padded = [name for name in old.bottom if name in paddings]
    if not padded:
        return
    if old.layer.type not in ("conv", "pool") or len(old.bottom) != 1:
        raise UpgradeError(
            f"blob '{padded[0]}' comes from a padding layer; expected a conv or pool layer of one "
            "bottom to read it",
            layer=index,
        )
    padding = paddings[padded[0]]
    new.bottom[0] = padding.bottom[0]
    if old.layer.type == "conv":
        new.convolution_param.pad[:] = [padding.layer.pad]
    else:
        new.pooling_param.pad = padding.layer.pad


def _fill(new: V1LayerParameter, old: V0LayerParameter, index: int) -> None:
    """Copy the type and every setting of a V0 layer."""
    if old.HasField("type"):
        if old.type not in _TYPES:
            raise UpgradeError(
                f"unknown layer type '{old.type}' of Caffe's first format (V0); expected one of "
                f"{', '.join(_TYPES)}",
                layer=index,
            )
        new.type = _TYPES[old.type]
    for field, value in old.ListFields():
        if field.name == "type":
            continue
        paths = _FIELDS.get(field.name, {})
        path = paths.get(_ANY) or paths.get(old.type)
        if path is not None:
            _set(new, path, _translated(field.name, value))


def _translated(name: str, value: Any) -> Any:
    """Convert a value to V1, which has its own enum types."""
    if name == "pool":
        return PoolingParameter.PoolMethod.Value(V0LayerParameter.PoolMethod.Name(value))
    return value


def _set(message: Any, path: str, value: Any) -> None:
    """Set the field at a dotted path.

    A single value becomes the only element of a repeated field.
    """
    *blocks, name = path.split(".")
    for block in blocks:
        message = getattr(message, block)
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.is_repeated:
        values = value if hasattr(value, "__len__") and not isinstance(value, str) else [value]
        getattr(message, name).extend(values)
    elif field.message_type is not None:
        getattr(message, name).CopyFrom(value)
    else:
        setattr(message, name, value)


NET_UPGRADES = (
    (is_v0, from_v0),
    (is_v1, from_v1),
    (has_old_transformation, move_transformation),
    (has_inputs, to_input_layer),
    (has_batch_norm_params, fix_batch_norm),
)


def upgrade_net(net: NetParameter) -> NetParameter:
    """Return the net, read from text or from a model file, in the current format.

    `net` itself is not changed.

    Each layer stays one layer in the same order, except that V0's padding layers are folded into
    their readers (`v0.kept_layers`) and the net's inputs become a new first layer.

    Raises:
        UpgradeError: the net contradicts itself, or has settings that no format knows.
    """
    for needed, transform in NET_UPGRADES:
        if needed(net):
            net = transform(net)
    return net


def needs_upgrade(net: NetParameter) -> bool:
    """Return whether `upgrade_net` would change anything."""
    return any(needed(net) for needed, _ in NET_UPGRADES)


def upgrade_solver(solver: SolverParameter) -> SolverParameter:
    """Return the solver in the current format, without upgrading the nets inside.

    `solver` is not changed.

    Raises:
        UpgradeError: the solver contradicts itself.
    """
    return to_type(solver) if has_solver_type(solver) else solver
