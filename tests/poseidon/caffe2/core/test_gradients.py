"""The backward pass: versions, sums, sparse gradients, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from poseidon.caffe2.core import (
    IR,
    BlobReference,
    CreateOperator,
    GradientRegistry,
    GradientSlice,
    Net,
)
from poseidon.caffe2.proto.caffe2_pb2 import DeviceOption

Wanted = list[tuple[str, str, str]]


@pytest.fixture(autouse=True)
def kinds() -> Iterator[None]:
    """Operators for tests: their gradients read the gradients only, the output too, nothing, or
    are sparse.
    """

    def register(kind: str, reads: Any, sparse: bool = False) -> None:
        def gradient(op: Any, given: list[Any]) -> Any:
            names = [f"{name}_grad" for name in op.input]
            if reads is None:
                return [], [None for _ in op.input]
            blobs = [BlobReference(str(name)) for name in (*reads(op), *given)]
            if sparse:
                parts = [f"{names[0]}_indices", f"{names[0]}_values"]
                made = CreateOperator(
                    f"{kind}Gradient", blobs, [BlobReference(part) for part in parts]
                )
                return made, [GradientSlice(*parts)]
            references = [BlobReference(name) for name in names]
            return CreateOperator(f"{kind}Gradient", blobs, references), names

        GradientRegistry.RegisterGradient(kind)(gradient)

    register("Plain", lambda op: [])
    register("Output", lambda op: op.output)
    register("Input", lambda op: op.input)
    register("Nothing", None)
    register("Rows", lambda op: [], sparse=True)
    yield
    for kind in ("Plain", "Output", "Input", "Nothing", "Rows"):
        del GradientRegistry.gradient_registry_[kind]


def backward(operators: list[tuple[str, str, str]], ys: Any) -> tuple[list[str], dict[str, Any]]:
    made, gradients = GradientRegistry.GetBackwardPass(
        [CreateOperator(kind, x.split(), y.split()) for kind, x, y in operators], ys
    )
    lines = [f"{op.type}({' '.join(op.input)}) -> {' '.join(op.output)}" for op in made]
    return lines, {str(name): gradient for name, gradient in gradients.items()}


def test_a_reader_without_gradient_adds_nothing() -> None:
    lines, _ = backward(
        [("Plain", "x", "a"), ("Nothing", "x", "b"), ("Plain", "a b", "y")], {"y": "dy"}
    )
    assert lines[-1] == "PlainGradient(a_grad) -> x_grad"


@pytest.mark.parametrize(
    ("operators", "ys", "message"),
    [
        ([("Output", "x", "h"), ("Plain", "h", "h"), ("Output", "h", "y")], {"y": "dy"}, "version"),
        ([("Input", "x", "y"), ("Plain", "x", "x")], {"y": "dy"}, "version"),
        ([("Plain", "x", "x"), ("Plain", "y", "x"), ("Plain", "x", "y")], {"y": "dy"}, "version"),
        (
            [("Rows", "w", "a"), ("Plain", "w", "b"), ("Plain", "a b", "y")],
            {"y": "dy"},
            "dense and sparse gradients",
        ),
    ],
)
def test_what_cannot_be_differentiated_is_refused(operators: Wanted, ys: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        backward(operators, ys)


def test_an_orphan_stop_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="'b' is orphan"):
        backward(
            [("Plain", "x", "a"), ("StopGradient", "a", "b"), ("Plain", "a", "y")], {"y": "dy"}
        )


def test_an_operator_without_gradient_is_named() -> None:
    with pytest.raises(Exception, match=r"Exception when creating gradient for \[Sign\]: ?the"):
        backward([("Sign", "x", "y")], ["y"])


def test_a_gradient_in_place_is_renamed_with_all_that_makes_it() -> None:
    net = Net("chain")
    net.Sqrt("x", "a")
    net.Sqrt("x", "b")
    net.Add(["a", "b"], "y")
    net.AddGradientOperators(["y"])
    lines = [
        f"{op.type}({' '.join(op.input)}) -> {' '.join(op.output)}" for op in net.Proto().op[-5:]
    ]
    assert lines == [
        "Scale(b_grad) -> x_grad",
        "Div(x_grad b) -> x_grad",
        "Scale(a_grad) -> _x_grad_autosplit_0",
        "Div(_x_grad_autosplit_0 a) -> _x_grad_autosplit_0",
        "Sum(x_grad _x_grad_autosplit_0) -> x_grad",
    ]


def test_an_operator_with_too_few_inputs_does_not_pass_schema_checking() -> None:
    net = Net("schema")
    made = net.Mul("a", "b")
    with pytest.raises(Exception, match="schema checking: Mul: 1 inputs are given"):
        net.AddGradientOperators([made])


def test_zero_gradient_stands_for_a_missing_one() -> None:
    net = Net("zero")
    hidden, cell = net.LSTMUnit(["h", "c", "g", "s", "t"], ["hidden", "cell"])
    with pytest.raises(Exception, match="LSTMUnit"):
        net.AddGradientOperators([hidden])
    net.ZeroGradient(cell, [])
    net.AddGradientOperators([hidden])
    fill = next(op for op in net.Proto().op if op.type == "ConstantFill" and op.input[0] == "cell")
    assert list(fill.output) == ["cell_grad"]


def test_ensure_dense_makes_a_sparse_gradient_dense() -> None:
    net = Net("dense")
    net.EnsureDense("table", "table")
    net.Gather(["table", "rows"], "picked")
    gradients = net.AddGradientOperators({"picked": "picked_grad"})
    assert gradients["table"] == "table_grad"
    made = net.Proto().op[-1]
    assert (made.type, list(made.input)) == ("SparseToDense", ["rows", "picked_grad", "table"])


@pytest.mark.parametrize("marked_only", [False, True])
def test_a_tag_keeps_the_device_option_of_the_readers_from_the_sum(marked_only: bool) -> None:
    option = DeviceOption(extra_info=["mine"])
    if marked_only:
        option.extra_info.append(f"{IR.ONLY_KEEP_IS_AUTO_GEN_SUM_OPS_TAG}:1")
    readers = [CreateOperator("Mul", ["x", "c"], [name], device_option=option) for name in "ab"]
    made, _ = GradientRegistry.GetBackwardPass(
        [*readers, CreateOperator("Add", ["a", "b"], ["y"])], ["y"]
    )
    (total,) = (op for op in made if op.type == "Sum" and "x_grad" in op.output)
    mark = f"{IR.IS_AUTO_GEN_SUM_OPS_TAG}:1"
    assert list(total.device_option.extra_info) == ([mark] if marked_only else ["mine", mark])


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs"),
    [
        ("ImageInput", "reader", "x label"),
        ("TensorProtosDBInput", "reader", "x label"),
        ("DequeueBlobs", "queue", "x label"),
        ("SafeDequeueBlobs", "queue", "x status"),
        ("BatchOneHot", "codes lengths values", "x"),
    ],
)
def test_a_path_ends_at_an_operator_without_gradient(kind: str, inputs: str, outputs: str) -> None:
    lines, gradients = backward([(kind, inputs, outputs), ("Output", "x w", "y")], {"y": "dy"})
    assert lines == ["OutputGradient(y dy) -> x_grad w_grad"]
    assert gradients == {"y": "dy", "x": "x_grad", "w": "w_grad"}


def test_a_path_through_an_operator_that_must_not_be_differentiated_is_refused() -> None:
    with pytest.raises(Exception, match=r"gradient for \[ResizeLike\]:the operator ResizeLike"):
        backward([("ResizeLike", "w like", "x"), ("Output", "x", "y")], {"y": "dy"})
