"""Which field a name that is none most likely means."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

from poseidon.errors import nearest

_OTHER_WORDS = {
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
"""What other frameworks call a field, with Caffe's names."""


def nearest_field(name: str, descriptor: Descriptor) -> str | None:
    """The field of a message that a wrong name most likely means; words of other frameworks count."""
    fields = descriptor.fields_by_name
    known = _OTHER_WORDS.get(name.lower())
    return next((field for field in known or () if field in fields), None) or nearest(name, fields)
