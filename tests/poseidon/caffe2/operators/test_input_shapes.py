"""Input shapes: what a line allows, what the error says, and operators that torch would let
broadcast or crash.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.operators.input_shapes import axis_of, parse_shapes
from poseidon.caffe2.operators.registry import find, registered
from tests.support.caffe2_operators import call

Shapes = list[tuple[int, ...]]


@pytest.mark.parametrize(
    ("line", "shapes"),
    [
        ("*S, *S", [(2, 3), (2, 3)]),
        ("*S, *S", [(), ()]),
        ("*S, ...", [(4,), (4,), (4,)]),
        ("*S, one, ...", [(4,), (), (4,), (1, 1)]),
        ("N C *S, C", [(2, 3), (3,)]),
        ("N C *S, C", [(2, 3, 5, 5), (3,)]),
        ("1 N D, 1 N 4D", [(1, 2, 3), (1, 2, 12)]),
        ("1 N 4D, 1 N D", [(1, 2, 12), (1, 2, 3)]),
        ("*S 2, *S", [(5, 6, 2), (5, 6)]),
        ("N *, N", [(3, 1, 7), (3,)]),
        ("?, N", [(), (3,)]),
        ("N _, _ *", [(2, 7), (9, 1)]),
        ("N, _, ...", [(2,), (7,), (2,), (9,)]),
        ("N", [(3,), (9, 9)]),  # the line tells nothing of the second
    ],
)
def test_shapes_that_fit(line: str, shapes: Shapes) -> None:
    parse_shapes(line).check(shapes, ["a", "b", "c", "d"][: len(shapes)])


@pytest.mark.parametrize(
    ("line", "shapes", "message"),
    [
        ("*S, *S", [(2, 3), (3,)], r"b has the shape (3,), expected (2, 3)"),
        ("*S, *S", [(2, 3), (2, 1)], r"b has the shape (2, 1), expected (2, 3)"),
        ("*S, ...", [(4,), (4,), ()], r"c has the shape (), expected (4,)"),
        ("*S, one, ...", [(4,), (), (4,), (4,)], r"d has the shape (4,), expected one value"),
        ("N C *S, C", [(2,), (3,)], r"a has the shape (2,), expected (N, C, ...)"),
        ("N C *S, C", [(2, 3, 5), (1,)], r"b has the shape (1,), expected (3,)"),
        (
            "1 N D, 1 N 4D",
            [(1, 2, 3), (1, 2, 13)],
            r"b has the shape (1, 2, 13), expected (1, 2, 12)",
        ),
        (
            "1 N 4D, 1 N D",
            [(1, 2, 13), (1, 2, 3)],
            r"a has the shape (1, 2, 13), expected (1, 2, 4D)",
        ),
        ("*S, *S 2", [(5, 6), (5, 6)], r"b has the shape (5, 6), expected (5, 6, 2)"),
        ("N *, N", [(), (1,)], r"a has the shape (), expected (N, ...)"),
        ("N _ *", [(2,)], r"a has the shape (2,), expected (N, any, ...)"),
        ("N *, N", [(3, 2), (3, 1)], r"b has the shape (3, 1), expected (3,)"),
    ],
)
def test_shapes_that_do_not_fit(line: str, shapes: Shapes, message: str) -> None:
    with pytest.raises(ValueError, match=r"\A.*\Z") as caught:
        parse_shapes(line).check(shapes, ["a", "b", "c", "d"][: len(shapes)])
    assert str(caught.value) == message


def test_the_order_nhwc_has_the_channels_last() -> None:
    shapes = parse_shapes("N C *S, C").channels_last()
    shapes.check([(2, 5, 6, 3), (3,)], ["x", "s"])
    with pytest.raises(ValueError, match=r"s has the shape \(5,\), expected \(3,\)"):
        shapes.check([(2, 5, 6, 3), (5,)], ["x", "s"])


@pytest.mark.parametrize("line", ["", "n", "N,,C", "*S *T", "N-C", "..."])
def test_a_line_of_another_form_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="has no form of shapes"):
        parse_shapes(line)


@pytest.mark.parametrize(
    ("axis", "dimensions", "expected"), [(0, 1, 0), (-1, 3, 2), (2, 3, 2), (-3, 3, 0)]
)
def test_an_axis_counts_from_either_end(axis: int, dimensions: int, expected: int) -> None:
    assert axis_of(axis, dimensions) == expected


@pytest.mark.parametrize(("axis", "dimensions"), [(1, 1), (-4, 3), (7, 2)])
def test_an_axis_that_is_not_there_is_refused(axis: int, dimensions: int) -> None:
    with pytest.raises(
        ValueError, match=f"the axis is {axis}, expected -{dimensions} to {dimensions - 1}"
    ):
        axis_of(axis, dimensions)


def test_no_operator_declares_more_inputs_than_it_has() -> None:
    declared = {name: found for name in registered() if (found := find(name)).expected is not None}
    assert len(declared) > 300
    for name, found in declared.items():
        for shapes in (found.shapes, found.expected):
            assert shapes is None or len(shapes.inputs) <= found.inputs[1], name


IMAGES = (2, 3, 4, 4)
REFUSED: list[tuple[str, Shapes, dict[str, Any], str]] = [
    # torch would broadcast
    ("Sum", [(4, 1), (4,)], {}, "x1 has the shape (4,), expected (4, 1)"),
    ("Max", [(4, 1), (4,)], {}, "x1 has the shape (4,), expected (4, 1)"),
    ("WeightedSum", [(4,), (), (1,), ()], {}, "x2 has the shape (1,), expected (4,)"),
    ("FC", [(2, 3), (4, 3), (1,)], {}, "the bias has the shape (1,), expected (4,)"),
    ("FCTransposed", [(2, 3), (3, 4), (2, 4)], {}, "the bias has the shape (2, 4), expected (4,)"),
    ("MomentumSGD", [(3, 1), (3, 2), ()], {}, "x1 has the shape (3, 2), expected (3, 1)"),
    ("MomentumSGDUpdate", [(3, 2), (3, 2), (2,), (3, 2)], {}, "x2 has the shape (2,), expected "
"one value"),
    ("Adam", [(3, 2), (3, 2), (3, 2), (1, 2), (), ()], {}, "x3 has the shape (1, 2), expected (3, "
"2)"),
    ("Adagrad", [(3, 2), (3, 2), (2,), ()], {}, "x2 has the shape (2,), expected (3, 2)"),
    ("SigmoidCrossEntropyWithLogits", [(4, 1), (4,)], {}, "x1 has the shape (4,), expected (4, 1)"),
    ("SquaredL2Distance", [(4, 3), (1, 3)], {}, "x1 has the shape (1, 3), expected (4, 3)"),
    ("CrossEntropy", [(4, 3), (4, 1)], {}, "x1 has the shape (4, 1), expected (4, 3)"),
    ("LabelCrossEntropy", [(4, 3), (1,)], {}, "x1 has the shape (1,), expected (4, ...)"),
    ("Accuracy", [(4, 3), (1,)], {}, "x1 has the shape (1,), expected (4,)"),
    ("Where", [(1,), (4,), (4,)], {}, "the condition has the shape (1,), not (4,)"),
    ("LayerNorm", [(4, 3), (1,), (1,)], {}, "the scale has 1 value, expected 3"),
    ("InstanceNorm", [IMAGES, (1,), (1,)], {}, "x1 has the shape (1,), expected (3,)"),
    ("InstanceNorm", [IMAGES, (3,), (3,)], {"order": "NHWC"}, "x1 has the shape (3,), expected "
"(4,)"),
    ("LSTMUnit", [(1, 2, 3), (1, 2, 3), (1, 2, 4), (2,), ()], {}, "x2 has the shape (1, 2, 4), "
"expected (1, 2, 12)"),
    ("LengthsWeightedSum", [(4, 3), (1,), (2,)], {}, "x1 has the shape (1,), expected (4,)"),
    ("MarginRankingCriterion", [(4, 1), (4,), (1,)], {}, "the input y has 1 value, expected 4"),
    ("CosineEmbeddingCriterion", [(4,), (1,)], {}, "the input y has 1 value, expected 4"),
    ("BernoulliJSD", [(4,), (1,)], {}, "the input t has 1 value, expected 4"),
    ("RowMul", [(4, 3), (1,)], {}, "w has 1 value, expected 4"),
    ("SquareRootDivide", [(4, 3), (3,)], {}, "the scale has 3 values, expected 4"),
    ("BatchBoxCox", [(4, 3), (3,), (1,)], {}, "the input shifts has 1 value, expected 3"),
    # torch would read or write over the end, which may end the process
    ("SpatialBN", [IMAGES, (3,), (3,), (0,), (3,)], {"is_test": 0}, "x3 has the shape (0,), "
"expected (3,)"),
    ("ConvGradient", [IMAGES, (5, 3, 1, 1), (0, 5, 4, 4)], {}, "x2 has the shape (0, 5, 4, 4), "
"expected (2, 5, ...)"),
    ("ConvGradient", [IMAGES, (5, 3, 1, 1), (2, 5, 4, 3)], {}, "the gradient has (4, 3) windows, not (4, 4)"),
    ("AveragePoolGradient", [IMAGES, (3, 3, 2, 2), (3, 3, 2, 2)], {}, "x1 has the shape (3, 3, 2, "
"2), expected (2, 3, ...)"),
    ("AveragePoolGradient", [IMAGES, (2, 3, 3, 2), (2, 3, 3, 2)], {}, "the gradient has (3, 2) windows, not (2, 2)"),
    ("LpPoolGradient", [(0, *IMAGES[1:]), (2, 3, 2, 2), (2, 3, 2, 2)], {}, "x1 has the shape (2, "
"3, 2, 2), expected (0, 3, ...)"),
    # an axis would wrap around
    ("Softmax", [(2, 3)], {"axis": 7}, "the axis is 7, expected -2 to 1"),
    ("Concat", [(2, 3), (2, 3)], {"axis": 2}, "the axis is 2, expected -2 to 1"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "shapes", "arguments", "message"), REFUSED)
def test_operators_refuse_shapes_as_caffe2_did(
    kind: str, shapes: Shapes, arguments: dict[str, Any], message: str
) -> None:
    names = [f"x{index}" for index in range(len(shapes))]
    for name, shape in zip(names, shapes, strict=True):
        value = np.ones(shape, "bool" if (kind, name) == ("Where", "x0") else "float32")
        workspace.FeedBlob(name, value)
    if "Pool" in kind or "Conv" in kind:
        arguments = {"kernel": 1} if "Conv" in kind else {"kernel": 2, "stride": 2}
    outputs = [f"y{index}" for index in range(max(find(kind).outputs[0], 1))]
    with pytest.raises(RuntimeError, match=f"enforce fail at {kind}") as caught:
        call(kind, names, outputs, **arguments)
    line = str(caught.value).splitlines()[0]
    assert message in line


@pytest.mark.parametrize(
    ("kind", "usual", "others", "outputs"),
    [
        ("MarginRankingCriterion", [(4, 1), (4, 1), (4, 1)], [(4, 1), (4,), (1, 4)], [(4, 1)]),
        (
            "MarginRankingCriterionGradient",
            [(4,)] * 4,
            [(4,), (4, 1), (2, 2), (1, 4)],
            [(4,), (4, 1)],
        ),
        ("CosineEmbeddingCriterion", [(4,), (4,)], [(4,), (4, 1)], [(4,)]),
        ("CosineEmbeddingCriterionGradient", [(4,)] * 3, [(4,), (4, 1), (2, 2)], [(4,)]),
        ("BernoulliJSD", [(4, 1), (4, 1)], [(4, 1), (4,)], [(4, 1)]),
        ("BernoulliJSDGradient", [(4, 1)] * 3, [(4,), (4, 1), (4,)], [(4, 1)]),
        ("RowMul", [(4, 3), (4,)], [(4, 3), (4, 1)], [(4, 3)]),
        ("SquareRootDivide", [(4,), (4,)], [(4,), (4, 1)], [(4,)]),
        ("BatchBoxCox", [(4, 3), (3,), (3,)], [(4, 3), (1, 3), (3, 1)], [(4, 3)]),
    ],
)
def test_inputs_of_as_many_values_are_taken_in_order_as_by_caffe2(
    kind: str, usual: Shapes, others: Shapes, outputs: Shapes
) -> None:
    names, results = [f"y{index}" for index in range(len(outputs))], []
    for shapes in (usual, others):
        generator = np.random.default_rng(0)
        for index, shape in enumerate(shapes):
            workspace.FeedBlob(f"x{index}", generator.uniform(0.1, 0.9, shape).astype("float32"))
        call(kind, [f"x{n}" for n in range(len(shapes))], names)
        results.append([workspace.FetchBlob(name) for name in names])
    assert [value.shape for value in results[1]] == outputs
    for expected, found in zip(*results, strict=True):
        np.testing.assert_array_equal(found.ravel(), expected.ravel())


@pytest.mark.parametrize(
    ("indices", "slices"), [((2,), (2, 3)), ((2, 1), (2, 1, 3)), ((1, 2), (6,))]
)
def test_slices_of_any_shape_are_assigned(
    indices: tuple[int, ...], slices: tuple[int, ...]
) -> None:
    workspace.FeedBlob("data", np.zeros((4, 3), "float32"))
    workspace.FeedBlob("places", np.array([3, 1]).reshape(indices))
    workspace.FeedBlob("rows", np.arange(6, dtype="float32").reshape(slices))
    operator = core.CreateOperator("ScatterAssign", ["data", "places", "rows"], ["data"])
    workspace.RunOperatorOnce(operator)
    expected = [[0, 0, 0], [3, 4, 5], [0, 0, 0], [0, 1, 2]]
    np.testing.assert_array_equal(workspace.FetchBlob("data"), expected)
    workspace.FeedBlob("rows", np.zeros(3, "float32"))
    with pytest.raises(RuntimeError, match="the input slices has 3 values, expected 6"):
        workspace.RunOperatorOnce(operator)


def test_an_empty_blob_does_not_reach_the_operator() -> None:
    images = np.ones(IMAGES, "float32")
    for name, value in (
        ("x", images),
        ("s", images[0, :, 0, 0]),
        ("dy", images),
        ("inverse", images[0, :, 0, 0]),
    ):
        workspace.FeedBlob(name, value)
    workspace.CreateBlob("mean")
    operator = core.CreateOperator(
        "SpatialBNGradient", ["x", "s", "dy", "mean", "inverse"], ["dx", "ds", "db"]
    )
    with pytest.raises(RuntimeError, match="mean is empty: no operator has given it a value"):
        workspace.RunOperatorOnce(operator)


def test_shapes_may_change_from_run_to_run() -> None:
    net = core.Net("shapes")
    net.SquaredL2Distance(["x", "y"], "z")
    for rows in (4, 2, 4):
        for name in ("x", "y"):
            workspace.FeedBlob(name, np.ones((rows, 3), "float32"))
        workspace.RunNetOnce(net)
    workspace.CreateNet(net)
    workspace.RunNet(net)
    workspace.FeedBlob("y", np.ones((1, 3), "float32"))
    with pytest.raises(RuntimeError, match=r"y has the shape \(1, 3\), expected \(4, 3\)"):
        workspace.RunNet(net)
