"""Caffe2's messages: nets, operators, tensors and plans, wire-compatible with Caffe2's files.

The `.proto` files beside this one hold the fields; `make proto` generates the modules. In the
descriptor pool the messages are in the package `poseidon.caffe2`, so that a real Caffe2 can be
loaded in the same process.
"""

from typing import Any, cast

from poseidon.caffe2.proto import caffe2_pb2

DEVICE_NUMBERS = {
    **{
        name.removeprefix("PROTO_"): number
        for name, number in caffe2_pb2.DeviceTypeProto.items()
        if name != "PROTO_COMPILE_TIME_MAX_DEVICE_TYPES"
    },
    "COMPILE_TIME_MAX_DEVICE_TYPES": 11,
    "ONLY_FOR_TEST": 20901701,
}
"""Device types by the plain name that scripts use: `caffe2_pb2.CPU`, `caffe2_pb2.CUDA`."""

for _name, _number in DEVICE_NUMBERS.items():
    setattr(cast(Any, caffe2_pb2), _name, _number)
