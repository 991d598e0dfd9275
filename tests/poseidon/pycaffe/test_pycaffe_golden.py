"""Every recorded case of real Caffe, run as its recorder ran it: blob by blob through pycaffe's
own execution.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import poseidon.pycaffe as caffe
from poseidon.caffe.layers import blob as blob_module
from tests.support.golden import FOLDER, cases

pytestmark = pytest.mark.needs("data")

TOLERANCE = 1e-4
# A sum that is zero in theory, such as the gradient of a bias below a BatchNorm.
NOISE = 1e-6


def worst(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the value or to a hundredth of the blob's largest."""
    assert found.shape == expected.shape
    largest = float(np.abs(expected).max(initial=0))
    if largest < NOISE:
        return 0.0 if float(np.abs(found).max(initial=0)) < 10 * NOISE else 1.0
    return float(
        (np.abs(found - expected) / np.maximum(np.abs(expected), largest / 100)).max(initial=0)
    )


def of(case: Any, kind: str) -> Iterator[tuple[list[str], np.ndarray]]:
    """The case's arrays of one kind, with the rest of their names."""
    for key in case.files:
        head, *rest = key.split(":")
        if head == kind:
            yield rest, case[key]


@pytest.mark.parametrize("name", cases() or [""])
def test_as_caffe(name: str) -> None:
    run(name)


@pytest.mark.parametrize(
    "name", ["bn_train", "conv_1d_axis2", "eltwise_prod", "lstm", "residual", "shared_params"]
)
def test_as_caffe_with_memory_apart_from_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: layers and users each have a copy of every blob."""
    monkeypatch.setattr(blob_module, "needs_host_copy", lambda _: True)
    run(name)


def run(name: str) -> None:
    """Set, run forward and backward, compare."""
    path = FOLDER / f"{name}.prototxt"
    case = np.load(path.with_suffix(".npz"), allow_pickle=False)
    net = caffe.Net(str(path), getattr(caffe, str(case["phase"])))
    for (layer, index), array in of(case, "param"):
        net.params[layer][int(index)].data[...] = array
    for (blob,), array in of(case, "in"):
        net.blobs[blob].data[...] = array
    net.forward()
    for (blob,), array in of(case, "out"):
        assert worst(net.blobs[blob].data, array) <= TOLERANCE, f"out:{blob}"
    for (blob,), array in of(case, "topdiff"):
        net.blobs[blob].diff[...] = array
    net.clear_param_diffs()
    net.backward()
    for (blob,), array in of(case, "grad"):
        assert worst(net.blobs[blob].diff, array) <= TOLERANCE, f"grad:{blob}"
    for kind, side in (("pgrad", "diff"), ("param_after", "data")):
        for (layer, index), array in of(case, kind):
            found = getattr(net.params[layer][int(index)], side)
            assert worst(found, array) <= TOLERANCE, f"{kind}:{layer}:{index}"
