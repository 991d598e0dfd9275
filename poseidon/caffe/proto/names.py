"""Suggestions for unknown field names."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

from poseidon.errors import nearest

_FOREIGN_NAMES = {
    "lr": ("base_lr", "lr_mult"),
    "learning_rate": ("base_lr", "lr_mult"),
    "epochs": ("max_iter",),
    "max_epoch": ("max_iter",),
    "iterations": ("max_iter",),
    "num_iterations": ("max_iter",),
    "seed": ("random_seed",),
    "gpu": ("device_id", "solver_mode"),
    "gpu_id": ("device_id",),
    "mode": ("solver_mode",),
    "optimizer": ("type",),
    "steps": ("stepvalue",),
    "decay": ("weight_decay",),
    "kernel": ("kernel_size",),
    "padding": ("pad",),
    "filters": ("num_output",),
    "out_channels": ("num_output",),
    "units": ("num_output",),
    "fc_param": ("inner_product_param",),
    "ip_param": ("inner_product_param",),
    "linear_param": ("inner_product_param",),
    "bn_param": ("batch_norm_param",),
    "batch": ("batch_size",),
    "path": ("source",),
    "input_layer": ("bottom",),
    "inputs": ("bottom",),
    "outputs": ("top",),
    "output": ("top", "num_output"),
}
"""The names that other frameworks use, with Caffe's fields."""
_BLOCK = "_param"


def nearest_field(name: str, descriptor: Descriptor) -> str | None:
    """Return the field of a message that an unknown name most likely means, or
    None. Names of other frameworks are known.
    """
    fields = descriptor.fields_by_name
    known = _FOREIGN_NAMES.get(name.lower())
    if found := next((field for field in known or () if field in fields), None):
        return found
    if not name.endswith(_BLOCK):
        return nearest(name, fields)
    # The common ending would make any two blocks similar.
    stems = [field.removesuffix(_BLOCK) for field in fields if field.endswith(_BLOCK)]
    near = nearest(name.removesuffix(_BLOCK), stems)
    return None if near is None else near + _BLOCK
