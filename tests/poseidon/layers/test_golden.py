"""Every recorded case of real Caffe whose layer types exist: outputs and gradients to 1e-4 relative."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from poseidon.layers.base import LayerContext
from poseidon.layers.registry import known_types
from poseidon.net.compile import compile_net
from poseidon.net.net import Net
from poseidon.proto.caffe_pb2 import NetState, Phase
from poseidon.proto.definition import read_net

TOLERANCE = 1e-4
NOISE = 1e-6
FOLDER = Path(os.environ.get("POSEIDON_SHARED", Path(__file__).parents[4] / "shared")) / "golden" / "layers"
CASES = sorted(path.stem for path in FOLDER.glob("*.prototxt")) or [
    pytest.param("", marks=pytest.mark.skip(reason=f"no recorded cases: {FOLDER} is absent"))
]


def close(found: torch.Tensor, expected: np.ndarray, what: str) -> None:
    """Shapes equal, and each value to the tolerance, relative to itself or to a hundredth of the blob's largest."""
    array = found.detach().numpy()
    assert array.shape == expected.shape, what
    largest = float(np.abs(expected).max(initial=0))
    if largest < NOISE:
        # A sum that is zero in theory, such as the gradient of a bias below a BatchNorm.
        assert float(np.abs(array).max(initial=0)) < 10 * NOISE, what
        return
    # Where large terms cancel, Caffe's own last bits are noise: hence the hundredth.
    scale = np.maximum(np.abs(expected), largest / 100)
    worst = float((np.abs(array - expected) / scale).max(initial=0))
    assert worst <= TOLERANCE, f"{what}: relative difference {worst:.2e}"


def load(net: Net, case: Any) -> None:
    blobs: dict[str, list[np.ndarray]] = {}
    for key in case.files:
        if key.startswith("param:"):
            blobs.setdefault(key.split(":")[1], []).append(case[key])
    net.load_blobs(list(blobs.items()))


@pytest.mark.parametrize("name", CASES)
def test_as_caffe(name: str) -> None:
    definition = read_net(FOLDER / f"{name}.prototxt")
    missing = sorted({layer.type for layer in definition.param.layer} - known_types())
    if missing:
        pytest.skip(f"no layer type {', '.join(missing)} yet")
    case = np.load(FOLDER / f"{name}.npz", allow_pickle=False)
    phase = Phase.Value(str(case["phase"]))
    net = compile_net(definition, LayerContext(phase=phase, seed=0), state=NetState(phase=phase))
    net.keep_blobs = True
    load(net, case)
    given = {key[3:]: torch.from_numpy(case[key].copy()) for key in case.files if key.startswith("in:")}
    if definition.param.force_backward:
        given = {key: value.requires_grad_() for key, value in given.items()}
    net(given)
    for key in case.files:
        if key.startswith("out:"):
            close(net.blobs[key[4:]], case[key], key)
    tops = [key[8:] for key in case.files if key.startswith("topdiff:")]
    tops = [top for top in tops if net.blobs[top].requires_grad]
    if tops:
        diffs = [torch.from_numpy(case[f"topdiff:{top}"].copy()) for top in tops]
        torch.autograd.backward([net.blobs[top] for top in tops], diffs)
    check_gradients(net, case, given)


def check_gradients(net: Net, case: Any, given: dict[str, torch.Tensor]) -> None:
    """A blob that the backward pass never reached has the zero gradient."""
    layers = dict(net.layer_modules)
    for key in case.files:
        kind, *path = key.split(":")
        if kind == "grad":
            value = given[path[0]]
            close(torch.zeros_like(value) if value.grad is None else value.grad, case[key], key)
        elif kind == "pgrad":
            parameter = layers[path[0]].sources()[int(path[1])]
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            close(grad, case[key], key)
        elif kind == "param_after":
            close(layers[path[0]].blobs()[int(path[1])], case[key], key)
