"""The cost of operators: operations, bytes written, bytes read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace

F, INT, D = np.float32, np.int32, np.float64
CASES: list[tuple[str, list[tuple[tuple[int, ...], Any]], dict[str, Any], tuple[int, int, int]]] = [
    # x has 6 channels, W says 2 in 3 groups; the output has 5 * 5 places.
    (
        "Conv",
        [((4, 6, 7, 5), F), ((9, 2, 3, 1), F), ((9,), F)],
        {"kernel_h": 3, "kernel_w": 1, "group": 3},
        (2 * 4 * 9 * 25 * 6, 4 * 4 * 9 * 25, 4 * (840 + 54 + 9)),
    ),
    (
        "Conv2D",
        [((1, 3, 5, 8), D), ((2, 3, 3, 8), D)],
        {
            "kernel": 3,
            "pad_t": 1,
            "pad_l": 1,
            "pad_b": 1,
            "pad_r": 1,
            "stride_h": 1,
            "stride_w": 1,
            "order": "NHWC",
        },
        (2 * 30 * 72, 8 * 30, 8 * (120 + 144)),
    ),
    ("FC", [((2, 3, 4), F), ((5, 12), F), ((5,), F)], {}, (2 * 5 * 25, 40, 4 * (24 + 60 + 5))),
    (
        "FCTransposed",
        [((2, 3, 4), F), ((4, 5), F), ((5,), F)],
        {"axis": 2},
        (6 * 5 * 9, 120, 4 * (24 + 20 + 5)),
    ),
    ("BatchMatMul", [((3, 4, 2), F), ((3, 4, 5), F)], {"trans_a": 1}, (240, 120, 4 * (24 + 60))),
    ("BatchMatMul", [((7,), F), ((7,), F)], {"broadcast": 1}, (14, 4, 56)),
    ("Mul", [((3, 4), F), ((4,), F)], {"broadcast": 1}, (12, 48, 64)),
    ("Sum", [((3, 4), F)] * 3, {}, (24, 48, 144)),
    ("WeightedSum", [((3, 4), F), ((1,), F)] * 2, {}, (36, 48, 104)),
    ("Relu", [((3, 4), F)], {}, (0, 48, 48)),
    ("LeakyRelu", [((3, 4), F)], {}, (24, 48, 48)),
    ("SpatialBN", [((2, 3, 4, 4), F)] + [((3,), F)] * 4, {}, (192, 384, 384 + 48)),
    ("Concat", [((2, 3), INT), ((2, 1), INT)], {}, (0, 32 + 8, 32)),
    ("Split", [((2, 3), INT), ((3,), INT)], {"axis": 1}, (0, 24, 36)),
    ("BatchOneHot", [((4, 2), INT), ((2,), INT), ((7,), INT)], {}, (0, 4 * 7 * 4, 68)),
]


@pytest.mark.parametrize(("kind", "inputs", "arguments", "expected"), CASES)
def test_a_cost(
    kind: str,
    inputs: list[tuple[tuple[int, ...], Any]],
    arguments: dict[str, Any],
    expected: tuple[int, int, int],
) -> None:
    names = [f"x{index}" for index in range(len(inputs))]
    for name, (shape, dtype) in zip(names, inputs, strict=True):
        workspace.FeedBlob(name, np.zeros(shape, dtype))
    op = core.CreateOperator(kind, names, ["y"], **arguments)
    cost = workspace.GetOperatorCost(op, op.input)
    assert cost == expected
    assert (cost.flops, cost.bytes_written, cost.bytes_read) == expected
    assert workspace.GetOperatorCost(op.SerializeToString(), names) == expected


def test_an_operator_of_unknown_cost_is_named() -> None:
    op = core.CreateOperator("Sin", ["x"], ["y"])
    with pytest.raises(RuntimeError, match=r"the cost of Sin is not known; .*: Conv, "):
        workspace.GetOperatorCost(op, ["x"])
