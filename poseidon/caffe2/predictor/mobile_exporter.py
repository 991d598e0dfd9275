"""The two nets of a mobile device: one that holds the parameters, one that predicts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from poseidon.caffe2 import core, utils
from poseidon.caffe2.proto import caffe2_pb2

_FILLERS = {
    np.dtype("float32"): "GivenTensorFill",
    np.dtype("bool"): "GivenTensorBoolFill",
    np.dtype("int16"): "GivenTensorInt16Fill",
    np.dtype("int32"): "GivenTensorIntFill",
    np.dtype("int64"): "GivenTensorInt64Fill",
    np.dtype("uint8"): "GivenTensorByteStringToUInt8Fill",
    np.dtype("O"): "GivenTensorStringFill",
}


def add_tensor(net: Any, name: str, blob: np.ndarray) -> None:
    """Append to a NetDef the operator that makes a tensor.

    Args:
        net: a NetDef.
        name: of the tensor.
        blob: its values; values of type uint8 become one string, objects must be `bytes`.

    Raises:
        ValueError: no operator makes tensors of this type.
    """
    filler = _FILLERS.get(blob.dtype)
    if filler is None:
        known = ", ".join(str(dtype) for dtype in _FILLERS)
        raise ValueError(f"The blob {name} of type {blob.dtype} is not exported; {known} are")
    values: Any = [blob.tobytes()] if blob.dtype == np.uint8 else blob
    if blob.dtype == object and not all(isinstance(value, bytes) for value in blob.flat):
        raise ValueError(f"The blob {name} of objects cannot be exported; tensors of bytes can")
    arguments = [utils.MakeArgument("shape", blob.shape), utils.MakeArgument("values", values)]
    net.op.extend([core.CreateOperator(filler, [], [name], arg=arguments)])


def Export(workspace: Any, net: Any, params: Iterable[Any]) -> tuple[Any, Any]:
    """Return the NetDefs that make parameters and predict, for files and for `Predictor`.

    The second's inputs are first in its external inputs; the first fills them with zeros.

    Args:
        workspace: the module `workspace`, or what has its `FetchBlob`.
        net: a net or a NetDef.
        params: its parameters.
    """
    proto = net if isinstance(net, caffe2_pb2.NetDef) else net.Proto()
    predict_net, init_net = caffe2_pb2.NetDef(), caffe2_pb2.NetDef()
    predict_net.CopyFrom(proto)
    names = [str(blob) for blob in params]
    ssa, versions = core.get_ssa(net)
    read = {name for inputs, _ in ssa for name, _ in inputs}
    fed = [name for name, version in versions.items() if version == 0 and name not in names]
    for name in names:
        add_tensor(init_net, name, workspace.FetchBlob(name))
    zero = [utils.MakeArgument("shape", [1, 1]), utils.MakeArgument("values", [0.0])]
    init_net.op.extend(core.CreateOperator("GivenTensorFill", [], [name], arg=zero) for name in fed)
    del predict_net.external_input[:], predict_net.external_output[:]
    predict_net.external_input.extend(dict.fromkeys([*fed, *proto.external_input]))
    predict_net.external_output.extend(
        name for name, version in versions.items() if version != 0 and name not in read
    )
    return init_net, predict_net
