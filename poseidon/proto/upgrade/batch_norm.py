"""BatchNorm layers that state three `param` blocks, one for each blob of statistics.

As Caffe's UpgradeNetBatchNorm: once they were needed to keep the solver away from the statistics, and could say anything;
now lr_mult and decay_mult are 0 whatever they say.
"""

from __future__ import annotations

from poseidon.proto.caffe_pb2 import LayerParameter, NetParameter

BLOBS = 3


def has_batch_norm_params(net: NetParameter) -> bool:
    """Whether a BatchNorm layer states the three blocks and any of them would let the solver move its blob."""
    return any(_is_old(layer) for layer in net.layer)


def fix_batch_norm(net: NetParameter) -> NetParameter:
    """The net with the statistics of every such layer left alone by the solver."""
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
