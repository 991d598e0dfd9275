"""Operators as functions of PyTorch give what the operators give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from poseidon.caffe2 import torch_ops
from tests.support.caffe2_operators import Array, numbers, run

X = numbers(3, 4)
LENGTHS = np.array([2, 0, 1], np.int32)
BYTES = run("FloatToFused8BitRowwiseQuantized", [X])[0]
CASES: list[tuple[str, list[Array], int, dict[str, Any]]] = [
    ("BatchBucketOneHot", [X[:, :2], np.array([1, 2], np.int32), numbers(3)], 1, {}),
    ("Bucketize", [X], 1, {"boundaries": [-1.0, 0.25, 0.5]}),
    ("Fused8BitRowwiseQuantizedToFloat", [BYTES], 1, {}),
    ("Gelu", [X], 1, {"fast_gelu": True}),
    ("IndexHash", [np.arange(7)], 1, {"seed": 3, "modulo": 5}),
    ("LayerNorm", [X, numbers(4), numbers(4, seed=1)], 3, {"axis": -1, "epsilon": 0.1}),
    ("LengthsMax", [X, LENGTHS], 1, {}),
    ("LengthsMean", [X, LENGTHS], 1, {}),
    ("LengthsSum", [X, LENGTHS], 1, {}),
    ("Logit", [np.array([0.1, 0.7, 1.0], "f4")], 1, {"eps": 0.2}),
    ("Percentile", [X[:2, :1], np.array([[-1, 0.2], [2, 0.9]], "f4"), LENGTHS[:1]], 1, {}),
    (
        "PiecewiseLinearTransform",
        [X[:, :1]],
        1,
        {
            "bounds": [-1.0, 0.0, 1.0],
            "slopes": [2.0, 3.0],
            "intercepts": [0.5, 0.1],
            "binary": True,
        },
    ),
    (
        "ResizeNearest",
        [numbers(1, 2, 2, 3)],
        1,
        {"order": "NCHW", "width_scale": 2.0, "height_scale": 1.5},
    ),
    ("UnpackSegments", [LENGTHS, numbers(3, 2, 2)], 1, {}),
]


@pytest.mark.parametrize(("kind", "inputs", "outputs", "arguments"), CASES)
def test_a_function_of_pytorch_is_the_operator(
    kind: str, inputs: list[Array], outputs: int, arguments: dict[str, Any]
) -> None:
    function = getattr(torch.ops._caffe2, kind)
    made = function(*[torch.tensor(value) for value in inputs], **arguments)
    expected = run(kind, inputs, outputs, **arguments)
    for value, wanted in zip([made] if outputs == 1 else made, expected, strict=True):
        np.testing.assert_array_equal(value.numpy(), wanted)


def test_each_function_has_a_case() -> None:
    assert [schema.partition("(")[0] for schema in torch_ops.SCHEMAS] == [case[0] for case in CASES]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layer_norm_without_scale_in_torchscript() -> None:
    @torch.jit.script
    def normalized(x: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
        y, mean, _ = torch.ops._caffe2.LayerNorm(x, None, None, 1, epsilon)
        return y, mean

    with torch.no_grad():
        y, mean = normalized(torch.tensor(X), 0.01)
    wanted = run("LayerNorm", [X], 3, epsilon=0.01)
    np.testing.assert_array_equal(y.numpy(), wanted[0])
    np.testing.assert_array_equal(mean.numpy(), wanted[1])


def test_gradients_flow_through_a_function() -> None:
    x = torch.tensor(X, requires_grad=True)
    torch.ops._caffe2.Gelu(x).sum().backward()
    other = torch.tensor(X, requires_grad=True)
    torch.nn.functional.gelu(other).sum().backward()
    assert x.grad is not None and other.grad is not None
    torch.testing.assert_close(x.grad, other.grad)
