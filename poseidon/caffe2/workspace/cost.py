"""The cost of operators, times of nets, and the changes of nets that Caffe2 called transforms."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.workspace import Workspace
from poseidon.caffe2.workspace.current import current
from poseidon.caffe2.workspace.nets import StringifyNetName, StringifyProto, _net_def


def GetOperatorCost(operator: Any, blobs: Sequence[str]) -> tuple[int, int]:
    """Return floating point operations and bytes that an operator reads and writes.

    Args:
        operator: an OperatorDef or its bytes.
        blobs: its inputs in the current workspace.

    Raises:
        RuntimeError: the operator has no known cost.
    """
    op = caffe2_pb2.OperatorDef.FromString(StringifyProto(operator))
    inputs: list[torch.Tensor] = [current().get(name).value for name in blobs]
    arguments = {argument.name: argument.i for argument in op.arg}
    if op.type.startswith("Conv"):
        x, w = inputs[:2]
        kernel = w.shape[2:]
        pads = [arguments.get(f"pad_{side}", arguments.get("pad", 0)) for side in "tblr"]
        sizes = [
            (size + pads[2 * axis] + pads[2 * axis + 1] - kernel[axis])
            // arguments.get(f"stride_{'hw'[axis]}", arguments.get("stride", 1))
            + 1
            for axis, size in enumerate(x.shape[2:])
        ]
        made = x.shape[0] * w.shape[0] * int(torch.tensor(sizes).prod())
        flops = 2 * made * w[0].numel()
    elif op.type == "FC":
        made = inputs[0].shape[0] * inputs[1].shape[0]
        flops = made * (2 * inputs[1].shape[1] + 1)
    else:
        raise EnforceNotMet(f"The cost of the operator {op.type} is not known")
    return flops, 4 * (sum(value.numel() for value in inputs) + made)


def BenchmarkNet(name: Any, warmup_runs: int, main_runs: int, run_individual: bool) -> list[float]:
    """Return milliseconds of one run of a created net, and of each of its operators where these are asked for.

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
    """Return a net after a transform; the only one that exists is `ConvToNNPack`, which sets an engine.

    Raises:
        RuntimeError: there is no such transform.
    """
    if transform_key != "ConvToNNPack":
        raise EnforceNotMet(f"There is no transform {transform_key}")
    proto = caffe2_pb2.NetDef()
    proto.CopyFrom(_net_def(net))
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
