"""What real Caffe computed, case by case, beside what is computed here."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import NetState, Phase
from poseidon.caffe.proto.definition import NetDefinition, read_net
from tests.support.needs import SHARED

FOLDER = SHARED / "golden" / "layers"
TOLERANCE = 1e-4
# Where no values are added up.
TOLERANCE_OF_ONE_VALUE = 1e-5
NOISE = 1e-6
POINTWISE = frozenset(
    {
        *(
            "AbsVal",
            "ArgMax",
            "BNLL",
            "Clip",
            "Concat",
            "Crop",
            "Dropout",
            "ELU",
            "Exp",
            "Flatten",
            "Input",
            "Log",
        ),
        *("Power", "ReLU", "Reshape", "Sigmoid", "Slice", "Swish", "TanH", "Threshold"),
    }
)


def cases() -> list[str]:
    """Names of the recorded cases; none where they are absent."""
    return sorted(path.stem for path in FOLDER.glob("*.prototxt"))


def definition_of(case: str) -> NetDefinition:
    """The net of a case."""
    return read_net(FOLDER / f"{case}.prototxt")


def tolerance_of(case: str) -> float:
    """How far a case may be off, relative."""
    types = {layer.type for layer in definition_of(case).param.layer}
    return TOLERANCE_OF_ONE_VALUE if types <= POINTWISE else TOLERANCE


def differences(case: str) -> dict[str, float]:
    """The largest relative difference of every recorded blob, gradient and parameter of a case."""
    definition = definition_of(case)
    recorded = np.load(FOLDER / f"{case}.npz", allow_pickle=False)
    phase = Phase.Value(str(recorded["phase"]))
    net = compile_net(definition, LayerContext(phase=phase, seed=0), state=NetState(phase=phase))
    net.keep_blobs = True
    _load(net, recorded)
    given = {
        key[3:]: torch.from_numpy(recorded[key].copy())
        for key in recorded.files
        if key.startswith("in:")
    }
    if definition.param.force_backward:
        given = {key: value.requires_grad_() for key, value in given.items()}
    net(given)
    # A later pass may overwrite what a layer shows of its outputs.
    found = {
        key: difference(net.blobs[key[4:]], recorded[key])
        for key in recorded.files
        if key.startswith("out:")
    }
    tops = [key[8:] for key in recorded.files if key.startswith("topdiff:")]
    tops = [top for top in tops if net.blobs[top].requires_grad]
    if tops:
        diffs = [torch.from_numpy(recorded[f"topdiff:{top}"].copy()) for top in tops]
        torch.autograd.backward([net.blobs[top] for top in tops], diffs)
    return found | _gradients(net, recorded, given)


def difference(found: torch.Tensor, expected: np.ndarray) -> float:
    """The largest difference, relative to the value itself or to a hundredth of the blob's largest.

    Where large terms cancel, Caffe's own last bits are noise: hence the hundredth. A blob that is
    zero in theory, such as the gradient of a bias below a BatchNorm, is held to ten times that
    noise.
    """
    array = found.detach().numpy()
    assert array.shape == expected.shape, f"shape {array.shape}, expected {expected.shape}"
    largest = float(np.abs(expected).max(initial=0))
    if largest < NOISE:
        return 0.0 if float(np.abs(array).max(initial=0)) < 10 * NOISE else float("inf")
    scale = np.maximum(np.abs(expected), largest / 100)
    return float((np.abs(array - expected) / scale).max(initial=0))


def _load(net: Net, recorded: Any) -> None:
    blobs: dict[str, list[np.ndarray]] = {}
    for key in recorded.files:
        if key.startswith("param:"):
            blobs.setdefault(key.split(":")[1], []).append(recorded[key])
    net.load_blobs(list(blobs.items()))


def _gradients(net: Net, recorded: Any, given: dict[str, torch.Tensor]) -> dict[str, float]:
    """A blob that the backward pass never reached has the zero gradient."""
    layers = dict(net.layer_modules)
    found = {}
    for key in recorded.files:
        kind, *path = key.split(":")
        if kind == "grad":
            value = given[path[0]]
            found[key] = difference(
                torch.zeros_like(value) if value.grad is None else value.grad, recorded[key]
            )
        elif kind == "pgrad":
            parameter = layers[path[0]].sources()[int(path[1])]
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[key] = difference(grad, recorded[key])
        elif kind == "param_after":
            found[key] = difference(layers[path[0]].blobs()[int(path[1])], recorded[key])
    return found
