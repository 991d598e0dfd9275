"""V0, Caffe's first grammar: `layers { layer { type: "conv" ... } bottom: ... }`.

It is recognised, and refused with a sentence that says what to do.
"""

from __future__ import annotations

from poseidon.proto.caffe_pb2 import NetParameter
from poseidon.proto.upgrade.errors import UpgradeError


def is_v0(net: NetParameter) -> bool:
    """Whether any layer is in the V0 grammar."""
    return any(layer.HasField("layer") for layer in net.layers)


def refuse_v0(net: NetParameter) -> NetParameter:
    """Raises UpgradeError for the first layer in the V0 grammar."""
    index = next(index for index, layer in enumerate(net.layers) if layer.HasField("layer"))
    raise UpgradeError(
        "this is Caffe's first grammar, layers { layer { ... } }, which is not read here; "
        "bring the file to today's with Caffe's upgrade_net_proto_text",
        layer=index,
    )
