"""Single runs of operators and nets, and files of nets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poseidon.caffe2.export.files import read_net
from poseidon.caffe2.onnx.workspace import Workspace, named_outputs
from poseidon.caffe2.proto.caffe2_pb2 import NetDef, OperatorDef
from poseidon.engine.snapshot_files import write_atomically


def c2_native_run_op(op_def: OperatorDef, inputs: Any) -> tuple[Workspace, Any]:
    """Run an operator; return its workspace and its outputs, a named tuple.

    Args:
        op_def: the operator.
        inputs: arrays in the order of its inputs, or by name.
    """
    workspace = Workspace()
    _feed(workspace, op_def.input, inputs, op_def.device_option)
    workspace.RunOperatorOnce(op_def)
    return workspace, named_outputs(workspace, op_def.output)


def c2_native_run_net(
    init_net: NetDef | None, predict_net: NetDef, inputs: Any
) -> tuple[Workspace, Any]:
    """Run a net; return its workspace and its external outputs, a named tuple.

    Args:
        init_net: makes the parameters; None: there are none.
        predict_net: the net.
        inputs: arrays in the order of the external inputs that `init_net` does not make, or of all
            external inputs where it makes all; or by name.

    Raises:
        ValueError: there are more inputs than that.
    """
    workspace = Workspace()
    if init_net is not None:
        workspace.RunNetOnce(init_net)
    names = [name for name in predict_net.external_input if not workspace.HasBlob(name)]
    _feed(workspace, names or predict_net.external_input, inputs, predict_net.device_option)
    workspace.RunNetOnce(predict_net)
    return workspace, named_outputs(workspace, predict_net.external_output)


def _feed(workspace: Workspace, names: Sequence[str], inputs: Any, device: Any) -> None:
    named = inputs if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=False))
    if len(named) < len(inputs):
        raise ValueError(f"{len(inputs)} inputs are given, there are {len(names)}")
    for name, value in named.items():
        workspace.FeedBlob(name, value, device)


def load_caffe2_net(file: str) -> NetDef:
    """Return the net of a file, binary or `.pbtxt`.

    Raises:
        SnapshotError: it cannot be read, or holds no net.
    """
    return read_net(Path(file))


def save_caffe2_net(net: NetDef, file: str, output_txt: bool = False) -> None:
    """Write a net to a file, and with `output_txt` as text to `<file>txt`.

    Raises:
        SnapshotError: it cannot be written.
    """
    write_atomically(Path(file), net.SerializeToString())
    if output_txt:
        write_atomically(Path(f"{file}txt"), str(net).encode())


def benchmark_caffe2_model(
    init_net: NetDef | None,
    predict_net: NetDef,
    warmup_iters: int = 3,
    main_iters: int = 10,
    layer_details: bool = True,
) -> float:
    """Return the time of a run of a net, in milliseconds; see `workspace.BenchmarkNet`."""
    workspace = Workspace()
    if init_net is not None:
        workspace.RunNetOnce(init_net)
    workspace.CreateNet(predict_net)
    found = workspace.BenchmarkNet(predict_net.name, warmup_iters, main_iters, layer_details)
    return float(found[0])
