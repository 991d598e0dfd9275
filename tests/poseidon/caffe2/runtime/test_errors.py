"""What an operator's failure says: texts of torch and Python become sentences on the inputs, own
ones stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.operators.input_shapes import parse_shapes
from poseidon.caffe2.operators.registry import find
from poseidon.caffe2.runtime.errors import cause, is_own

SHAPES = "the shapes of the inputs do not fit together"
TYPES = "the type of an input is not one that the operator takes"
INDEX = "an index lies outside of the input that it is for"
X, Y, IDS, TEXTS = torch.ones(2, 3), torch.ones(4, 5), torch.tensor([7]), np.array([b"a"], object)


@pytest.mark.parametrize(
    ("call", "inputs", "expected"),
    [
        (lambda x, y: x + y, (X, Y), SHAPES),
        (lambda x, y: x @ y, (X, Y), SHAPES),
        (lambda x: x.reshape(7), (X,), SHAPES),
        (lambda x, y: torch.cat((x, y)), (X, Y), SHAPES),
        (lambda x: functional.conv2d(x, x), (X,), SHAPES),
        (lambda x: min(x.shape[2:]), (X,), SHAPES),
        (lambda x, y: x @ y.t().double(), (X, X), TYPES),
        (lambda x: x[x], (X,), TYPES),
        (lambda x: x - x, (X.bool(),), TYPES),
        (lambda x, ids: x[ids], (X, IDS), INDEX),
        (lambda x, ids: x.index_select(0, ids), (X, IDS), INDEX),
        (lambda x: x[:0].amax(0), (X,), "an axis to reduce has the size 0"),
        (lambda x: x.sum(5), (X,), "an input has too few dimensions"),
        (lambda x: x.shape[5], (X,), "an input has too few dimensions"),
        (lambda x: torch.zeros(2).repeat_interleave(x), (-IDS,), "an input has a negative value "
"where none is allowed"),
        (lambda x: x + 1, (TEXTS,), "x is a tensor of strings, expected numbers"),
        (lambda x, y: x.reshape(y.shape), (X, None), "y is empty: no operator has given it a "
"value"),
        (lambda x, y: x + y, (X, None), "y is empty: no operator has given it a value"),
        (lambda x, y: x + y, (X, b"text"), "y is of type bytes, expected another type of blob"),
        (lambda x: x.count_up(), (X,), "x is of type Tensor, expected another type of blob"),
        (lambda x: 1 // x.storage_offset(), (X,), "the size of an input, or an argument, is 0"),
    ],
)  # fmt: skip
def test_what_torch_and_python_report(
    call: Callable[..., Any], inputs: tuple[Any, ...], expected: str
) -> None:
    with pytest.raises(
        (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
    ) as caught:
        call(*inputs)
    assert not is_own(caught.value)
    assert cause(caught.value, dict(zip("xy", inputs, strict=False))) == expected


def test_a_sentence_of_this_package_stays() -> None:
    with pytest.raises(ValueError, match="the shape") as caught:
        parse_shapes("N").check([(2, 3)], ["x"])
    assert is_own(caught.value)
    assert cause(caught.value, {"x": X}) == "x has the shape (2, 3), expected (N,)"


def test_what_is_no_fault_of_an_input_stays() -> None:
    assert (
        cause(FileNotFoundError(2, "No such file"), {})
        == "FileNotFoundError: [Errno 2] No such file"
    )
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert "allocate" in cause(caught.value, {})


@pytest.mark.parametrize(
    ("kind", "shapes", "reason"),
    [
        ("Add", [(2, 3), (4, 5)], SHAPES),
        ("ReluGradient", [(2, 3), (4, 5)], "x1 has the shape (4, 5), expected (2, 3)"),
        ("SortedSegmentSum", [(2, 3), (3,)], "x1 has the shape (3,), expected (2,)"),
        ("MergeDim", [(2,)], "x0 has the shape (2,), expected (N, M, ...)"),
        ("RoIPool", [(1, 3, 4), (2, 5)], "x0 has the shape (1, 3, 4), expected (N, any, any, any)"),
    ],
)
def test_a_failure_names_the_input_whose_shape_is_wrong(
    kind: str, shapes: list[tuple[int, ...]], reason: str
) -> None:
    names = [f"x{index}" for index in range(len(shapes))]
    for name, shape in zip(names, shapes, strict=True):
        workspace.FeedBlob(name, np.ones(shape, "float32"))
    with pytest.raises(RuntimeError) as caught:
        workspace.RunOperatorOnce(
            core.CreateOperator(kind, names, ["y", "z"][: find(kind).outputs[1]])
        )
    given = ", ".join(f"{name} {shape}" for name, shape in zip(names, shapes, strict=True))
    line = str(caught.value).splitlines()[0]
    assert (
        line == f"[enforce fail at {kind}] {reason}; this operator, {kind}, has the inputs {given}"
    )
    assert caught.value.__cause__ is not None  # torch's own text
