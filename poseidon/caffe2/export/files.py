"""Caffe2's files of trained nets: two NetDefs, binary or text, or a predictor in a database."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message
from torch import Tensor

from poseidon.base.foreign_files import read_definition
from poseidon.base.text_files import decoded
from poseidon.caffe.export.graph import Shape, typed_name
from poseidon.caffe.snapshot.caffemodel import LARGEST_MESSAGE
from poseidon.caffe2.predictor import predictor_py_utils as parts
from poseidon.caffe2.predictor_constants import predictor_constants
from poseidon.caffe2.proto.caffe2_pb2 import NetDef, OperatorDef
from poseidon.caffe2.proto.metanet_pb2 import MetaNetDef
from poseidon.caffe2.runtime.chains import first_reads, unread
from poseidon.caffe2.runtime.values import TORCH_OF
from poseidon.caffe2.runtime.workspace import Workspace
from poseidon.caffe2.utils import MakeArgument
from poseidon.errors import SnapshotError, UsageError

NETS = (".pb", ".pbtxt")
"""The suffixes of files with a NetDef."""
VALUE_INFO = "value_info.json"
"""The file beside a net that has the types and shapes of its inputs: {"data": [1, [1, 3, 224,
224]]}.
"""
INTEGERS: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(("Gather", "BatchGather", "SparseLengthsSum", "SparseLengthsMean"), (1, 2)),
    **dict.fromkeys(("LengthsSum", "LengthsMean"), (1,)),
    **dict.fromkeys(("SparseLengthsWeightedSum",), (2, 3)),
    **dict.fromkeys(("LSTMUnit", "GRUUnit"), (2, 3, 4)),
    "OneHot": (0, 1),
}
"""The inputs of operators that are integers."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """A trained net of Caffe2.

    Attributes:
        net: the net that predicts.
        parameters: its parameters by name.
        inputs: shape and type of the inputs by name, as numpy names types.
        outputs: the names of its outputs.
    """

    net: NetDef
    parameters: dict[str, Tensor]
    inputs: dict[str, tuple[Shape, str]]
    outputs: tuple[str, ...]


def is_caffe2(model: Path, weights: Path | None) -> bool:
    """Return whether the files of a command are Caffe2's: a NetDef, or a database alone."""
    return model.suffix.lower() in NETS or weights is None


def read_predictor(model: Path, weights: Path | None, shapes: Mapping[str, Shape]) -> Predictor:
    """Return the predictor of files.

    Args:
        model: the net that predicts, or a database of a predictor.
        weights: the net that fills the parameters; None for a database.
        shapes: of inputs by name, each with `:int64` where the type is not the one its use implies,
            in place of the shapes in `value_info.json` or in the database.

    Raises:
        SnapshotError: a file cannot be read.
        UsageError: the inputs are not known, or one of `shapes` is not an input.
    """
    typed = {typed_name(name)[0]: (shape, typed_name(name)[1]) for name, shape in shapes.items()}
    if weights is None and model.suffix.lower() in NETS:
        raise UsageError(f"the parameters of {model} are missing: name its init net after it")
    if weights is None and model.suffix.lower() == ".prototxt":
        raise UsageError(f"the weights of {model} are missing: name a .caffemodel after the net")
    if weights is None:
        if not model.exists():
            raise SnapshotError(f"{model}: there is no such file")
        return _from_database(model, typed)
    net, init = read_net(model), read_net(weights)
    if net.op and not any(op.input for op in net.op) and any(op.input for op in init.op):
        raise UsageError(f"{model} fills parameters: name the predict net before it")
    workspace = Workspace()
    _run(workspace, init, weights)
    return predictor_of(net, workspace, _value_info(model.parent / VALUE_INFO) | typed, (), model)


def read_net(path: Path) -> NetDef:
    """Return the net of a file.

    Raises:
        SnapshotError: it cannot be read, or holds no net.
    """
    try:
        content = read_definition(path, most_bytes=LARGEST_MESSAGE)
        if path.suffix.lower() == ".pbtxt":
            net: NetDef = text_format.Parse(decoded(content), NetDef())
        else:
            net = NetDef.FromString(content)
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror}") from error
    except (DecodeError, text_format.ParseError, UnicodeError) as error:
        raise SnapshotError(f"{path} is not a net of Caffe2: {error}") from error
    except RecursionError as error:
        raise SnapshotError(f"{path} is not a net of Caffe2: its blocks are too deep") from error
    if not net.op:
        raise SnapshotError(f"{path} is not a net of Caffe2: it has no operators")
    return net


def _value_info(path: Path) -> dict[str, tuple[Shape, str]]:
    if not path.exists():
        return {}
    try:
        return {
            str(name): (tuple(map(int, shape)), str(TORCH_OF[number]).removeprefix("torch."))
            for name, (number, shape) in json.loads(read_definition(path)).items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SnapshotError(
            f"{path} is not readable as shapes of inputs, expected "
            f'{{"data": [1, [1, 3, 224, 224]]}}'
        ) from error


def _run(workspace: Workspace, net: NetDef, path: Path) -> None:
    try:
        workspace.run_once(net)
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SnapshotError(f"the init net {path} does not run: {why}") from error


def _from_database(path: Path, shapes: Mapping[str, tuple[Shape, str]]) -> Predictor:
    workspace, reader = Workspace(), predictor_constants.PREDICTOR_DBREADER
    kind = "minidb" if path.is_file() else "lmdb" if (path / "data.mdb").exists() else "leveldb"
    open_it = OperatorDef(type="CreateDB", output=[reader])
    open_it.arg.extend([MakeArgument("db", str(path.absolute())), MakeArgument("db_type", kind)])
    load = OperatorDef(type="Load", input=[reader], output=[predictor_constants.META_NET_DEF])
    try:
        for op in (open_it, load):
            for name in op.output:
                workspace.create(name)
            workspace.run_operator(op)
        content = workspace.get(predictor_constants.META_NET_DEF).value
        meta = MetaNetDef.FromString(
            content if isinstance(content, bytes) else str(content).encode()
        )
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SnapshotError(f"{path} is not a predictor of Caffe2: {why}") from error
    for key in (
        predictor_constants.GLOBAL_INIT_NET_TYPE,
        predictor_constants.PREDICT_INIT_NET_TYPE,
    ):
        init = parts.GetNet(meta, key)
        if init is not None:
            _run(workspace, init, path)
    net = parts.GetNet(meta, predictor_constants.PREDICT_NET_TYPE)
    if net is None:
        raise SnapshotError(f"{path} has no net that predicts")
    inputs: dict[str, tuple[Shape, str]] = {}
    for name in parts.GetBlobs(meta, predictor_constants.INPUTS_BLOB_TYPE):
        blob = workspace.find(name)
        if blob is not None and isinstance(blob.value, Tensor) and blob.value.numel():
            inputs[name] = tuple(blob.value.shape), ""
    inputs |= shapes
    outputs = tuple(parts.GetBlobs(meta, predictor_constants.OUTPUTS_BLOB_TYPE))
    return predictor_of(net, workspace, inputs, outputs, path)


def predictor_of(
    net: NetDef,
    workspace: Workspace,
    inputs: Mapping[str, tuple[Shape, str]],
    outputs: tuple[str, ...],
    path: Path,
) -> Predictor:
    """Return the predictor of a net whose parameters are in a workspace.

    Args:
        net: the net that predicts.
        workspace: has its parameters.
        inputs: the shapes and types of its inputs; an empty type is the one that its use implies.
        outputs: their names; none: those of the net.
        path: of the net, for messages.

    Raises:
        UsageError: a name is not an input, or there are none.
    """
    read = first_reads(net.op)
    parameters = {
        name: blob.value for name, blob in workspace.blobs.items() if isinstance(blob.value, Tensor)
    }
    unknown = [name for name in inputs if name not in read]
    fed = [
        name
        for name in read
        if name not in parameters or name in inputs or _is_stand_in(parameters[name])
    ]
    if unknown:
        raise UsageError(f"{path} has no input '{unknown[0]}'; it has {', '.join(fed or read[:4])}")
    if not inputs:
        name = (fed or read[:1] or ["data"])[0]
        raise UsageError(
            f"the shapes of the inputs of {path} are not known: add --input={name}:N,C,H,W or a "
            f"{VALUE_INFO} beside it"
        )
    return Predictor(
        net=net,
        parameters={
            name: parameters[name] for name in read if name in parameters and name not in fed
        },
        inputs={
            name: (shape, dtype or ("int32" if _is_integer(net, name) else "float32"))
            for name, (shape, dtype) in inputs.items()
        },
        outputs=outputs or tuple(net.external_output or unread(net.op)),
    )


def _is_stand_in(value: Tensor) -> bool:
    """Return whether a value is the zero that `mobile_exporter` gives an input."""
    return tuple(value.shape) == (1, 1) and not bool(value.any())


def _is_integer(net: NetDef, name: str) -> bool:
    """Return whether operators read a blob as indices or lengths."""
    ops: list[Any] = list(net.op)
    ops += [
        step
        for op in net.op
        for argument in op.arg
        if argument.name == "step_net"
        for step in argument.n.op
    ]
    return any(
        name in (op.input[i] for i in INTEGERS.get(op.type, ()) if i < len(op.input)) for op in ops
    )


def arrays(predictor: Predictor) -> dict[str, np.ndarray]:
    """Return the parameters of a predictor as arrays."""
    return {name: value.detach().cpu().numpy() for name, value in predictor.parameters.items()}
