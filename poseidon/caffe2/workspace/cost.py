"""The cost of operators, times of nets, and the changes of nets that Caffe2 called transforms."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.proto.caffe2_pb2 import TensorProto
from poseidon.caffe2.runtime import bind
from poseidon.caffe2.runtime.bind import function_of
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.values import NUMBER_OF, TORCH_OF
from poseidon.caffe2.runtime.workspace import Workspace
from poseidon.caffe2.workspace.current import current
from poseidon.caffe2.workspace.nets import (
    StringifyBlobName,
    StringifyNetName,
    StringifyProto,
    _net_def,
)


def InferShapesAndTypes(
    nets: Iterable[Any],
    blob_dimensions: dict[Any, Sequence[int]] | None = None,
    nets_proto: bool = False,
    blob_types: dict[Any, int] | None = None,
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Return shapes and data types of the blobs of nets, those that follow without running.

    Args:
        nets: in the order in which they run.
        blob_dimensions: shapes of the inputs; by default the shapes of the workspace's blobs.
        nets_proto: whether `nets` are NetDefs.
        blob_types: data types of these inputs; by default FLOAT.
    """
    known: dict[str, torch.Tensor] = {}
    if blob_dimensions is None:
        for name, blob in current().blobs.items():
            if isinstance(blob.value, torch.Tensor):
                known[name] = blob.value.to("meta")
    else:
        types = {str(name): TORCH_OF[number] for name, number in (blob_types or {}).items()}
        for key, dims in blob_dimensions.items():
            known[str(key)] = torch.empty(
                list(dims), dtype=types.get(str(key), torch.float32), device="meta"
            )
    found = bind.infer([_net_def(net) for net in nets], known)
    return (
        {name: list(value.shape) for name, value in found.items()},
        {name: int(NUMBER_OF[value.dtype]) for name, value in found.items()},
    )


def data_type_of(dtype: Any) -> int:
    """Return the `TensorProto.DataType` of a numpy type; strings and objects are STRING."""
    kind = np.dtype(dtype)
    if kind.kind in "SUO":
        return int(TensorProto.STRING)
    return int(NUMBER_OF[torch.from_numpy(np.empty(0, dtype=kind)).dtype])


class OperatorCost(NamedTuple):
    """What an operator does in one run."""

    flops: int
    bytes_written: int
    bytes_read: int


def GetOperatorCost(operator: Any, blobs: Sequence[str]) -> OperatorCost:
    """Return the floating point operations of an operator, and the bytes that it writes and reads.

    Args:
        operator: an OperatorDef or its bytes.
        blobs: its inputs in the current workspace.

    Raises:
        RuntimeError: the operator has no known cost, or an input is not there.
    """
    op = caffe2_pb2.OperatorDef.FromString(StringifyProto(operator))
    if op.type not in _COSTS:
        raise EnforceNotMet(
            f"the cost of {op.type} is not known; the costs of these are: {', '.join(_COSTS)}"
        )
    inputs: list[torch.Tensor] = [current().get(StringifyBlobName(name)).value for name in blobs]
    flops, written = _COSTS[op.type](op, inputs)
    return OperatorCost(flops, written, sum(value.nbytes for value in inputs))


Cost = Callable[[caffe2_pb2.OperatorDef, list[torch.Tensor]], tuple[int, int]]
"""Returns operations and bytes written for an operator and its inputs."""


def _argument(op: caffe2_pb2.OperatorDef, name: str, default: int) -> int:
    return next((argument.i for argument in op.arg if argument.name == name), default)


def _by_value(operations: int) -> Cost:
    """Return the cost of so many operations for each value of the first input."""
    return lambda op, inputs: (operations * inputs[0].numel(), inputs[0].nbytes)


def _sum(op: caffe2_pb2.OperatorDef, inputs: list[torch.Tensor]) -> tuple[int, int]:
    return (len(inputs) - 1) * inputs[0].numel(), inputs[0].nbytes


def _concat(op: caffe2_pb2.OperatorDef, inputs: list[torch.Tensor]) -> tuple[int, int]:
    sizes = 4 * len(inputs)  # the second output: the size of each input, int32
    return 0, sum(value.nbytes for value in inputs) + sizes


def _one_hot(op: caffe2_pb2.OperatorDef, inputs: list[torch.Tensor]) -> tuple[int, int]:
    data, _, values = inputs
    return 0, len(data) * values.numel() * data.element_size()


def _fully_connected(transposed: bool) -> Cost:
    def cost(op: caffe2_pb2.OperatorDef, inputs: list[torch.Tensor]) -> tuple[int, int]:
        x, w = inputs[:2]
        axis, axis_w = _argument(op, "axis", 1) % x.dim(), _argument(op, "axis_w", 1) % w.dim()
        rows, columns = x.shape[:axis].numel(), x.shape[axis:].numel()
        outputs = (w.shape[axis_w:] if transposed else w.shape[:axis_w]).numel()
        return rows * outputs * (2 * columns + 1), rows * outputs * x.element_size()

    return cost


def _products(op: caffe2_pb2.OperatorDef, inputs: list[torch.Tensor]) -> tuple[int, int]:
    a = inputs[0]
    made = _made(op, inputs)
    inner = a.shape[-2] if _argument(op, "trans_a", 0) and a.dim() > 1 else a.shape[-1]
    return 2 * made.numel() * inner, made.nbytes


def _convolution(op: caffe2_pb2.OperatorDef, inputs: list[torch.Tensor]) -> tuple[int, int]:
    """Return the cost of a convolution; as in Caffe2, W alone says how many channels x has."""
    x, w = inputs[:2]
    place = -1 if any(argument.s == b"NHWC" for argument in op.arg) else 1
    sizes = list(x.shape)
    sizes[place] = w.shape[place] * _argument(op, "group", 1)
    made = _made(op, [x.new_empty(sizes, device="meta"), *inputs[1:]])
    return 2 * made.numel() * w[0].numel(), made.nbytes


def _made(op: caffe2_pb2.OperatorDef, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Return the output of an operator, without data."""
    meta = torch.device("meta")
    made: torch.Tensor = function_of(op, None, meta)(*[value.to(meta) for value in inputs])
    return made


_COSTS: dict[str, Cost] = {
    **dict.fromkeys(("Conv", "Conv1D", "Conv2D", "Conv3D"), _convolution),
    "FC": _fully_connected(transposed=False),
    "FCTransposed": _fully_connected(transposed=True),
    "BatchMatMul": _products,
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), _by_value(1)),
    **dict.fromkeys(("Sum", "WeightedSum"), _sum),
    "Relu": _by_value(0),
    **dict.fromkeys(("LeakyRelu", "ReluN", "ThresholdedRelu", "SpatialBN"), _by_value(2)),
    "Concat": _concat,
    "Split": _by_value(0),
    "BatchOneHot": _one_hot,
}


def BenchmarkNet(name: Any, warmup_runs: int, main_runs: int, run_individual: bool) -> list[float]:
    """Return milliseconds of a created net's run, and of each of its operators if asked for.

    Raises:
        RuntimeError: there is no such net.
    """
    plain = StringifyNetName(name)
    if plain not in current().nets:
        raise EnforceNotMet(f"Can't find net {plain}")
    net = current().nets[plain]
    for _ in range(warmup_runs):
        net.run()
    times = [_milliseconds(net.run, main_runs)]
    if run_individual:
        times += [_milliseconds(step, main_runs) for step in net.steps]
    return times


def _milliseconds(call: Any, runs: int) -> float:
    begin = time.perf_counter()
    for _ in range(runs):
        call()
    return 1000 * (time.perf_counter() - begin) / max(runs, 1)


def ApplyTransform(transform_key: str, net: Any) -> caffe2_pb2.NetDef:
    """Return a net after a transform; only `ConvToNNPack` exists, which sets an engine.

    Raises:
        RuntimeError: there is no such transform.
    """
    if transform_key != "ConvToNNPack":
        raise EnforceNotMet(f"There is no transform {transform_key}")
    proto = copy.deepcopy(_net_def(net))
    for op in proto.op:
        if op.type == "Conv" and op.device_option.device_type == 0:
            op.engine = "NNPACK"
    return proto


def ApplyTransformIfFaster(
    transform_key: str,
    net: Any,
    init_net: Any,
    warmup_runs: int = 5,
    main_runs: int = 10,
    improvement_threshold: float = 1.01,
) -> caffe2_pb2.NetDef:
    """Return a net after a transform where that makes it faster by the threshold, else the net."""
    before, after = _net_def(net), ApplyTransform(transform_key, net)
    times = []
    for proto in (before, after):
        workspace = Workspace(parent=current())
        workspace.run_once(_net_def(init_net))
        compiled = workspace.create_net(proto, overwrite=True)
        for _ in range(warmup_runs):
            compiled.run()
        times.append(_milliseconds(compiled.run, main_runs))
    return after if times[0] > improvement_threshold * times[1] else before
