"""Files of trained nets: ONNX, safetensors, torch's `.pth` and `.pt2`; and weights of torch's
files as a `.caffemodel`.

Law: a tensor is named `<layer>.<blob>`, as in `conv1.weight`, with the blob's name of
`docs/caffe_compatibility.md`.
"""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from poseidon.base.foreign_files import open_regular, read_definition
from poseidon.caffe.export.graph import Shape
from poseidon.caffe.export.net import export_net, inference_definition
from poseidon.caffe.layers.base import LayerContext, times
from poseidon.caffe.layers.batch_norm import BatchNorm
from poseidon.caffe.net.compile import compile_net, filter_phase
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.caffe.proto.definition import NetDefinition, read_net
from poseidon.caffe.snapshot.caffemodel import state_beside, write_model
from poseidon.caffe.tools.solo import fill
from poseidon.engine.snapshot_files import reseal, write_atomically
from poseidon.errors import DefinitionError, SnapshotError, UsageError

Arrays = Mapping[str, NDArray[Any]]
SUFFIXES = (".onnx", ".safetensors", ".pth", ".pt2")
MOST_BATCH = 4096
"""The largest batch of a `.pt2` file."""


def open_for_inference(
    model: Path, weights: Sequence[Path], shapes: Mapping[str, Shape], *, stages: Sequence[str] = ()
) -> Net:
    """Return a net of the phase TEST whose data comes from its caller, filled from models.

    Args:
        weights: models, later ones over earlier ones.
        shapes: see `inference_definition`.
        stages: for rules of the definition.

    Raises:
        DefinitionError: a mistake in the definition.
        SnapshotError: a model cannot be read, or does not fit.
        UsageError: a shape is missing, or belongs to no data.
    """
    definition = read_net(model)
    state = definition.state(TEST, stages=stages)
    definition = inference_definition(filter_phase(definition, state), shapes)
    net = compile_net(definition, LayerContext(phase=TEST, seed=1), state=state)
    fill(net, weights)
    return net


def check_suffix(path: Path) -> str:
    """Return the suffix of a file to export to, in small letters.

    Raises:
        UsageError: there is no such format.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(
            f"cannot export to {path}: expected a name that ends with {', '.join(SUFFIXES)}"
        )
    return suffix


def write_net(net: Net, path: Path) -> str:
    """Write a net in the format of the file's suffix. Return a line about it.

    Raises:
        UsageError: the suffix is unknown, or an optional package is missing.
        DefinitionError: the net has no form in this format.
        SnapshotError: the file cannot be written.
    """
    suffix = check_suffix(path)
    if suffix == ".onnx":
        exported = export_net(net, name=net.definition.param.name)
        content, line = exported.model.SerializeToString(), exported.summary()
    elif suffix == ".pt2":
        content, line = _pt2(net)
    else:
        content, line = tensor_file(named_tensors(net), suffix)
    write_atomically(path, content)
    return line


def tensor_file(tensors: Arrays, suffix: str) -> tuple[bytes, str]:
    """Return tensors by name as a file of a suffix, `.pth` or `.safetensors`, and a line about
    it.
    """
    if suffix == ".safetensors":
        content = _safetensors().save(
            {name: np.ascontiguousarray(a) for name, a in tensors.items()}
        )
    else:
        content = _pth(tensors)
    return content, f"{len(tensors)} tensors"


def named_tensors(net: Net) -> dict[str, NDArray[np.float32]]:
    """Return the learnable blobs of a net by `<layer>.<blob>`."""
    return {
        f"{layer.param.name}.{spec.name}": blob.detach().cpu().numpy()
        for _, layer in net.layer_modules
        for spec, blob in zip(layer.blob_specs, layer.blobs(), strict=True)
    }


def _pth(tensors: Arrays) -> bytes:
    buffer = io.BytesIO()
    torch.save({name: torch.from_numpy(array.copy()) for name, array in tensors.items()}, buffer)
    return buffer.getvalue()


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.numpy")
    except ImportError as error:
        raise UsageError(
            "for .safetensors files, install the extra: pip install 'poseidon[export]'"
        ) from error


class _TupleNet(nn.Module):
    """A net whose inputs and outputs are tuples, which `torch.export` takes."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.names = tuple(net.input_shapes)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.net(dict(zip(self.names, inputs, strict=True))).values())


def _pt2(net: Net) -> tuple[bytes, str]:
    """Return an exported program with a dynamic batch, and a line about it."""
    estimated = [layer for _, layer in net.layer_modules if isinstance(layer, BatchNorm)]
    for layer in estimated:
        layer.freeze_estimates()
    inputs = tuple(torch.zeros(2, *shape[1:]) for shape in net.input_shapes.values())
    try:
        content = traced_program(_TupleNet(net), inputs, dynamic=True)
    except Exception as error:
        why = str(error).strip().splitlines()[0]
        raise DefinitionError(
            f"torch.export cannot trace this net, whose shapes depend on its data ({why}); use "
            ".onnx",
            source=net.definition.source,
        ) from error
    shown = ", ".join(
        f"{name} {times(('N', *shape[1:]))}"  # type: ignore[arg-type]
        for name, shape in net.input_shapes.items()
    )
    return content, f"inputs: {shown}; outputs: {', '.join(name for name, _ in net.plan.outputs)}"


def traced_program(module: nn.Module, inputs: tuple[Tensor, ...], *, dynamic: bool) -> bytes:
    """Return the `.pt2` file of a module whose `forward` takes `*inputs`.

    Args:
        module: traced as it evaluates.
        inputs: examples; a dynamic batch must not be 1.
        dynamic: whether their first axis is the batch, 1 to `MOST_BATCH`.
    """
    batch = torch.export.Dim("N", min=1, max=MOST_BATCH)
    axes: dict[str, Any] = (
        {"dynamic_shapes": {"inputs": tuple({0: batch} for _ in inputs)}} if dynamic else {}
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `loss` of a net changes, which does not matter here
        program = torch.export.export(module.eval(), inputs, strict=False, **axes)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def read_tensors(path: Path) -> Arrays:
    """Return the tensors of a `.pth` or `.safetensors` file, or of a group's checkpoint, by name.

    Raises:
        SnapshotError: the file cannot be read, or has something else than tensors by name.
        UsageError: an optional package is missing.
    """
    try:
        if path.suffix.lower() == ".safetensors":
            content = read_definition(path, most_bytes=path.stat().st_size)
            loaded = _safetensors().load(content)
        else:
            with open_regular(path) as file, warnings.catch_warnings():
                # of pickles of other protocols, which are refused below
                warnings.simplefilter("ignore")
                loaded = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror or error}") from error
    except UsageError:
        raise
    except Exception as error:  # both libraries raise many types for files of something else
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        # torch's text advises to load it without protection
        if type(error).__name__ == "UnpicklingError":
            why = (
                "it is damaged, or has other objects than tensors; expected what "
                "torch.save(module.state_dict(), FILE) writes"
            )
        raise SnapshotError(f"{path} is not a file of tensors by name: {why}") from error
    for key in ("state_dict", "model"):  # the latter in a checkpoint of a group
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not loaded:
        raise SnapshotError(f"{path} has no tensors by name; expected a state_dict")
    arrays = {}
    for name, value in loaded.items():
        if not isinstance(value, Tensor | np.ndarray):
            raise SnapshotError(f"{path}: '{name}' is a {type(value).__name__}, expected a tensor")
        arrays[str(name)] = (
            value.float().numpy() if isinstance(value, Tensor) else value.astype(np.float32)
        )
    return arrays


def import_weights(
    definition: NetDefinition, arrays: Arrays, names: Mapping[str, str], path: Path
) -> tuple[int, list[str]]:
    """Write a `.caffemodel` with the tensors of a file. Return the number of tensors taken, and the
    names in the file that were not used.

    Args:
        definition: the net, whose data layers are left out as for an export.
        arrays: of the file, by name.
        names: the file's name of a tensor of this net, where it is another one.
        path: of the model.

    Raises:
        SnapshotError: a tensor of the net is missing, or has a different number of values.
    """
    context = LayerContext(phase=TEST, seed=1)
    net = compile_net(definition, context, state=definition.state(TEST))
    wanted = named_tensors(net)
    unknown = [name for name in names if name not in wanted]
    if unknown:
        raise UsageError(
            f"--name={unknown[0]}=...: the net has no such tensor; it has {_few(wanted)}"
        )
    missing = [
        theirs for theirs in (names.get(name, name) for name in wanted) if theirs not in arrays
    ]
    if missing:
        raise SnapshotError(
            f"the file has no tensor {_few(missing)}; it has {_few(arrays)}. Use --name=OURS=THEIRS"
        )
    for name, own in wanted.items():
        array = arrays[names.get(name, name)]
        if array.size != own.size:
            raise SnapshotError(
                f"'{names.get(name, name)}' has shape {times(array.shape)}, expected "
                f"{times(own.shape)} as '{name}' of the net"
            )
    blobs = [
        (
            layer.param.name,
            layer.param.type,
            [
                _taken(arrays, names, f"{layer.param.name}.{spec.name}", spec.shape)
                for spec in layer.blob_specs
            ],
        )
        for _, layer in net.layer_modules
    ]
    write_model(path, net.definition.param, blobs)
    reseal(state_beside(path), path)
    used = {names.get(name, name) for name in wanted}
    return len(wanted), [name for name in arrays if name not in used]


def _taken(
    arrays: Arrays, names: Mapping[str, str], name: str, shape: Shape
) -> NDArray[np.float32]:
    found: NDArray[np.float32] = arrays[names.get(name, name)].reshape(shape)
    return found


def _few(names: Sequence[str] | Mapping[str, object]) -> str:
    shown = list(names)
    rest = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    return ", ".join(shown[:4]) + rest
