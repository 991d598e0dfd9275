"""What is to be trained: a net of Caffe or a torch module, its shapes, its
batch, and the time of its own computation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.layers.registry import import_file
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.proto.caffe_pb2 import TRAIN, LayerParameter, NetParameter, NetState
from poseidon.caffe.proto.definition import NetDefinition, read_net, read_solver
from poseidon.caffe.tools.benchmark import backward, clock_of
from poseidon.caffe.tools.solo import zero_inputs
from poseidon.engine.leaf import mapped
from poseidon.errors import DataError, UsageError, described
from poseidon.observe.plan.shapes import LayerShape, elements, module_layers, net_layers
from poseidon.torch.factor_rows import Example, run_example, tensors_in

RECORD_LAYERS = ("Data", "ImageData", "WindowData")
"""Layers whose shapes are known from `crop_size` and `batch_size` without their data."""
COMPUTE_S = 4.0
"""How long the computation is measured, about; at least two passes."""
CHANNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A net to plan for.

    Attributes:
        layers: in forward order.
        batch: rows of a worker's batch.
        compute_s: one worker's forward and backward pass.
    """

    name: str
    layers: tuple[LayerShape, ...]
    batch: int
    compute_s: float
    notes: tuple[str, ...] = ()


def training_of_net(
    path: Path, *, compute_s: float | None, device: torch.device, is_solver: bool
) -> Training:
    """Return what a solver or a net definition trains.

    Args:
        path: prototxt of a solver, of a train net or of a deploy net.
        compute_s: of one worker; None: it is measured here.

    Raises:
        DefinitionError: a mistake in the definition.
        UsageError: the definition has no trained layer.
        DataError: its shapes need its data, which is not there.
    """
    definition, state = _read(path, is_solver)
    context = LayerContext(phase=TRAIN, seed=1, device=device)
    notes: list[str] = []
    try:
        net = compile_net(definition, context, state=state)
    except DataError as error:
        definition, replaced = _without_data(definition)
        if not replaced:
            raise DataError(
                f"{error}; without data the shapes are known from crop_size in the data layers, "
                "or from a deploy net (--net)"
            ) from error
        notes.append(
            f"{replaced} has no data here: records of its crop_size with {CHANNELS} channels are "
            "assumed"
        )
        net = compile_net(definition, context, state=state)
    try:
        layers = net_layers(net)
        shapes = net.blob_shapes
        first = next((shape for shape in shapes.values() if shape), (1,))
        if compute_s is None:
            inputs = zero_inputs(net)

            def run() -> None:
                backward(net, net(inputs))

            compute_s = _measured_s(run, device)
            notes.append(_measured_note(device))
    finally:
        net.close()
    return _training(str(path), layers, int(first[0]), compute_s, notes)


def training_of_module(text: str, *, compute_s: float | None, device: torch.device) -> Training:
    """Return what a function in a script builds: a module and an example batch.

    Args:
        text: `file.py:function`; the function returns a module and an example, the module's input.
        compute_s: of one worker; None: it is measured here.

    Raises:
        UsageError: there is no such function, or it returns something else, or it fails.
    """
    module, example = _call(text)
    module.to(device)
    example = mapped(example, lambda tensor: tensor.to(device))
    try:
        layers = module_layers(module, example)
        notes = []
        if compute_s is None:

            def run() -> None:
                module.zero_grad()
                _scalar(run_example(module, example)).backward()

            compute_s = _measured_s(run, device)
            notes.append(_measured_note(device))
    except Exception as error:  # the user's code may raise anything
        raise UsageError(
            f"--module={text}: the module does not run on its example: {described(error)}"
        ) from error
    tensors = list(tensors_in(example))
    batch = int(tensors[0].shape[0]) if tensors and tensors[0].dim() else 1
    return _training(text, layers, batch, compute_s, notes)


def _training(
    name: str, layers: tuple[LayerShape, ...], batch: int, compute_s: float, notes: list[str]
) -> Training:
    if not elements(layers):
        raise UsageError(f"{name} has no trained layer; expected a net with weights")
    return Training(name=name, layers=layers, batch=batch, compute_s=compute_s, notes=tuple(notes))


def _read(path: Path, is_solver: bool) -> tuple[NetDefinition, NetState]:
    if is_solver:
        solver = read_solver(path)
        definition = solver.net_definition()
        return definition, solver.train_state(definition)
    definition = read_net(path)
    return definition, definition.state(TRAIN)


def _without_data(definition: NetDefinition) -> tuple[NetDefinition, str]:
    """Return the definition with `DummyData` in place of layers that read
    records, and the name of the first of those.
    """
    param = NetParameter()
    param.CopyFrom(definition.param)
    replaced = ""
    for layer in param.layer:
        batch = _batch_size(layer)
        crop = layer.transform_param.crop_size
        if layer.type in RECORD_LAYERS and batch and crop:
            replaced = replaced or layer.name
            for top in range(len(layer.top)):
                shape = layer.dummy_data_param.shape.add()
                shape.dim.extend([batch, CHANNELS, crop, crop] if top == 0 else [batch])
            layer.type = "DummyData"
            for name in ("data_param", "image_data_param", "window_data_param", "transform_param"):
                layer.ClearField(name)
    return replace(definition, param=param), replaced


def _batch_size(layer: LayerParameter) -> int:
    settings: tuple[Any, ...] = (layer.data_param, layer.image_data_param, layer.window_data_param)
    return (
        max(int(setting.batch_size) for setting in settings) if layer.type in RECORD_LAYERS else 0
    )


def _call(text: str) -> tuple[nn.Module, Example]:
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not file.endswith(".py") or not name.isidentifier() or not path.is_file():
        raise UsageError(f"--module={text}: expected FILE.py:FUNCTION with a file that exists")
    try:
        script = import_file(path)
        function = getattr(script, name, None)
        returned = function() if callable(function) else None
    except Exception as error:  # the user's code may raise anything
        raise UsageError(f"--module={text}: it fails with {described(error)}") from error
    if not callable(function):
        raise UsageError(f"--module={text}: {path} has no function '{name}'")
    if not (
        isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module)
    ):
        raise UsageError(
            f"--module={text}: expected a module and an example batch, found "
            f"{type(returned).__name__}"
        )
    return returned


def _scalar(output: object) -> Tensor:
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not tensors:
        raise ValueError("no output has a gradient")
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


def _measured_s(run: Callable[[], None], device: torch.device) -> float:
    now = clock_of(device)
    run()
    seconds: list[float] = []
    end_s = time.monotonic() + COMPUTE_S
    while len(seconds) < 2 or (len(seconds) < 20 and time.monotonic() < end_s):
        began_s = now()
        run()
        seconds.append(now() - began_s)
    return statistics.median(seconds)


def _measured_note(device: torch.device) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the processor"
    return f"the compute time was measured on {where} of this machine; --compute=MS sets the time of the cluster's"
