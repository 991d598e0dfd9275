"""A torch module that `poseidon.distribute` trained, in other formats.

Law: a module comes from a function of the user, `train.py:build_model`, and its weights from a
checkpoint of a group or a file of tensors. Weights alone need no function.
"""

from __future__ import annotations

import importlib
import inspect
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from poseidon.base.paths import own_command
from poseidon.caffe.export.formats import (
    Arrays,
    check_suffix,
    read_tensors,
    tensor_file,
    traced_program,
)
from poseidon.caffe.export.graph import OPSET, GraphBlob, Shape, onnx_module, shape_text, typed_name
from poseidon.caffe.layers.registry import import_file
from poseidon.engine.snapshot_files import write_atomically
from poseidon.errors import DefinitionError, SnapshotError, UsageError

CHECKPOINT = ".pt"
"""The suffix of a checkpoint of a group."""


def names_module(model: Path) -> bool:
    """Return whether a word of the command names a function that makes a
    module: FILE.py:FUNCTION or MODULE:FUNCTION.
    """
    source, _, function = str(model).rpartition(":")
    return bool(source) and function.isidentifier()


def write_checkpoint_tensors(checkpoint: Path, path: Path) -> str:
    """Write the parameters and buffers of a checkpoint, and return a line about it.

    Raises:
        SnapshotError: the checkpoint cannot be read, or the file cannot be written.
        UsageError: the format needs the module.
    """
    suffix = check_suffix(path)
    if suffix in (".onnx", ".pt2"):
        raise UsageError(
            f"{suffix} needs the module: {own_command()} export train.py:build_model {checkpoint} "
            f"{path} --input=x:N,C,H,W"
        )
    content, line = tensor_file(read_tensors(checkpoint), suffix)
    write_atomically(path, content)
    return line


def write_module(model: Path, weights: Path, shapes: Mapping[str, Shape], path: Path) -> str:
    """Write a module with its weights in the format of the file's suffix, and return a line
    about it.

    Args:
        model: FILE.py:FUNCTION or MODULE:FUNCTION; the function takes nothing and returns the
            module.
        weights: a checkpoint of a group, or a state dict.
        shapes: of the inputs by the names of `forward`'s parameters, each with `:int64` where it is
            not float32.

    Raises:
        UsageError: there is no such function, or a name of an input is wrong.
        SnapshotError: the weights cannot be read, or do not fit.
        DefinitionError: torch cannot trace the module.
    """
    suffix = check_suffix(path)
    module = _filled(_made(model), read_tensors(weights), weights).eval()
    if suffix not in (".onnx", ".pt2"):
        arrays = {name: value.detach().cpu().numpy() for name, value in module.state_dict().items()}
        content, line = tensor_file(arrays, suffix)
    else:
        content, line = _traced(module, shapes, suffix)
    write_atomically(path, content)
    return line


def _made(model: Path) -> nn.Module:
    source, _, name = str(model).rpartition(":")
    if source.endswith(".py") and not Path(source).is_file():
        raise UsageError(f"there is no file {source}; expected FILE.py:FUNCTION")
    try:
        is_file = source.endswith(".py")
        script = import_file(Path(source)) if is_file else importlib.import_module(source)
        function = getattr(script, name, None)
        made = function() if callable(function) else None
    except Exception as error:
        raise UsageError(f"{model}: {type(error).__name__}: {error}") from error
    if function is None:
        raise UsageError(f"{source} has no function {name}")
    if not isinstance(made, nn.Module):
        raise UsageError(f"{model} gives a {type(made).__name__}, expected a torch module")
    return made


def _filled(module: nn.Module, arrays: Arrays, source: Path) -> nn.Module:
    """Return the module with the tensors of a file."""
    own = module.state_dict()
    missing, unknown = sorted(own.keys() - arrays.keys()), sorted(arrays.keys() - own.keys())
    for what, names in (("no tensor", missing), ("a tensor too many,", unknown)):
        if names:
            raise SnapshotError(f"{source} has {what} {names[0]} ({len(names)} such names)")
    for name, value in own.items():
        given = torch.from_numpy(np.array(arrays[name]))
        if given.shape != value.shape:
            raise SnapshotError(
                f"{source}: {name} has the shape {tuple(given.shape)}, the module's is "
                f"{tuple(value.shape)}"
            )
        value.copy_(given)
    return module


def _traced(module: nn.Module, shapes: Mapping[str, Shape], suffix: str) -> tuple[bytes, str]:
    types = dict(map(typed_name, shapes))
    given = {typed_name(name)[0]: shape for name, shape in shapes.items()}
    known = [name for name in inspect.signature(module.forward).parameters if name in given]
    unknown = [name for name in given if name not in known]
    if unknown or not given:
        names = ", ".join(inspect.signature(module.forward).parameters)
        raise UsageError(
            f"name each input of forward({names}): --input={(names or 'x').split(',')[0]}:N,C,H,W"
        )
    blobs = [
        GraphBlob(name=n, shape=given[n], dynamic=True, dtype=types[n] or "float32") for n in known
    ]
    content, fixed = _program(module, blobs)
    if suffix == ".onnx":
        content = _onnx(module, blobs, dynamic=not fixed)
    shown = ", ".join(
        f"{blob.name} {shape_text(GraphBlob(shape=blob.shape, dynamic=not fixed))}"
        for blob in blobs
    )
    line = f"opset {OPSET}; " if suffix == ".onnx" else ""
    return content, f"{line}inputs: {shown}" + (
        "; the batch is fixed: torch.export allows no other" if fixed else ""
    )


def _examples(blobs: list[GraphBlob], *, batch: int | None) -> tuple[Tensor, ...]:
    shapes = [blob.shape if batch is None else (batch, *blob.shape[1:]) for blob in blobs]
    return tuple(
        torch.from_numpy(np.zeros(shape, np.dtype(blob.dtype)))
        for shape, blob in zip(shapes, blobs, strict=True)
    )


class _Positional(nn.Module):
    """A module with positional inputs, which the tracers take."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(*inputs)


def _program(module: nn.Module, blobs: list[GraphBlob]) -> tuple[bytes, bool]:
    """Return the `.pt2` file, and whether the batch is fixed."""
    try:
        return traced_program(_Positional(module), _examples(blobs, batch=2), dynamic=True), False
    except Exception:  # noqa: BLE001 (the tracer raises many types for a batch that cannot change)
        pass
    try:
        return traced_program(
            _Positional(module), _examples(blobs, batch=None), dynamic=False
        ), True
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DefinitionError(
            f"torch.export cannot trace {type(module).__name__}: {why}"
        ) from error


def _onnx(module: nn.Module, blobs: list[GraphBlob], *, dynamic: bool) -> bytes:
    onnx_module()
    buffer, names = io.BytesIO(), [blob.name for blob in blobs]
    inputs = _examples(blobs, batch=2 if dynamic else None)
    with torch.no_grad(), warnings.catch_warnings():
        # the tracer of TorchScript is deprecated; the other one needs onnxscript
        warnings.simplefilter("ignore")
        made = module(*inputs)
        outputs = (
            ["output"] if isinstance(made, Tensor) else [f"output_{i}" for i in range(len(made))]
        )
        axes = {name: {0: "N"} for name in (*names, *outputs)} if dynamic else None
        try:
            torch.onnx.export(
                module,
                inputs,
                buffer,  # type: ignore[arg-type]
                input_names=names,
                output_names=outputs,
                dynamic_axes=axes,
                opset_version=OPSET,
                dynamo=False,
            )
        except Exception as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DefinitionError(
                f"torch cannot write {type(module).__name__} as ONNX: {why}"
            ) from error
    return buffer.getvalue()
