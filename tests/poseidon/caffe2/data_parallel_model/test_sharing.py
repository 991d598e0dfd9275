"""Less memory changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import data_parallel_model, workspace
from tests.support import caffe2_replicas as replicas


def trained(
    change: Callable[[Any], None] | None = None, **arguments: Any
) -> tuple[dict[str, np.ndarray], int]:
    """Return the parameters after training, and the number of blobs that the net names."""
    workspace.ResetWorkspace()
    model = replicas.build([0, 1], **arguments)
    if change is not None:
        change(model)
    replicas.train(model, 3, 8)
    names = {name for op in model.net.Proto().op for name in (*op.input, *op.output)}
    return replicas.params(model, 1), len(names)


@pytest.mark.parametrize(
    ("shapes", "activations"),
    [(None, True), ({"data": [4, replicas.FEATURES], "label": [4]}, False)],
)
def test_gradients_share_blobs(shapes: dict[str, list[int]] | None, activations: bool) -> None:
    plain, blobs = trained()
    shared, fewer = trained(
        lambda model: data_parallel_model.OptimizeGradientMemory(
            model, shapes, {"loss"}, activations
        )
    )
    assert fewer < blobs
    for name, value in plain.items():
        np.testing.assert_array_equal(shared[name], value)
    assert workspace.FetchBlob("cpu_1/loss") > 0


def test_blobs_are_freed_after_their_last_use() -> None:
    plain, _ = trained()
    freed, _ = trained(dynamic_memory_management=True, blobs_to_keep=["loss"])
    for name, value in plain.items():
        np.testing.assert_array_equal(freed[name], value)
    assert workspace.FetchBlob("cpu_1/loss") > 0
    with pytest.raises(AssertionError, match="exclude each other"):
        replicas.build([0], dynamic_memory_management=True, optimize_gradient_memory=True)
