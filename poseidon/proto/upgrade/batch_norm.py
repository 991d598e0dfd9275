"""Upgrade of BatchNorm layers with three `param` blocks, one for each blob of statistics.

As Caffe's UpgradeNetBatchNorm: such blocks once kept the solver from changing the statistics. Now lr_mult and decay_mult
are always 0.
"""

from __future__ import annotations

from poseidon.proto.caffe_pb2 import LayerParameter, NetParameter

BLOBS = 3


def has_batch_norm_params(net: NetParameter) -> bool:
    """Return whether a BatchNorm layer has three `param` blocks, any of them with a multiplier other than 0."""
    return any(_is_old(layer) for layer in net.layer)


def fix_batch_norm(net: NetParameter) -> NetParameter:
    """Return the net with lr_mult and decay_mult of such layers set to 0."""
    upgraded = NetParameter()
    upgraded.CopyFrom(net)
    for layer in upgraded.layer:
        if _is_old(layer):
            for param in layer.param:
                param.lr_mult = 0
                param.decay_mult = 0
    return upgraded


def _is_old(layer: LayerParameter) -> bool:
    return (
        layer.type == "BatchNorm"
        and len(layer.param) == BLOBS
        and any(param.lr_mult or param.decay_mult for param in layer.param)
    )
