"""The gradient operators of each operator are those that Caffe2 makes; others end a path or are
refused.

`gradients.csv` has what Caffe2 of PyTorch 1.10.2 answers for operators with inputs i0, i1, ...,
outputs o0, o1, ..., whose gradients are o0_grad, o1_grad, ..., and an argument `my_arg`; `-` stands
for an input without a gradient.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from poseidon.caffe2 import core
from poseidon.caffe2.core.gradients import GradientRegistry
from poseidon.caffe2.operators.registry import find, registered
from poseidon.caffe2.proto.caffe2_pb2 import OperatorDef

with (Path(__file__).parent / "gradients.csv").open(encoding="utf-8") as _file:
    ROWS = list(csv.DictReader(_file))
ARGUMENTS: dict[str, dict[str, Any]] = {"Cast": {"to": 1, "from_type": 2}, "Pow": {"exponent": 2.0}}
NOT_IN_THE_TABLE = {
    "CopyRowsToTensor",  # Caffe2 wants its output in place of an input
    "Dropout",  # Caffe2 wants the argument is_test
    "RSqrt",  # Caffe2 calls it Rsqrt
    "RecurrentNetwork",  # its gradient depends on its net
    "SpatialBN",  # Caffe2 wants outputs in place of inputs
}
"""Operators with a gradient of which the table tells nothing: tests of their own modules check
them.
"""


POW_BLOB = [
    "ConstantFill(i1) -> i1_grad {value=1.0}",
    "Sub(i1 i1_grad) -> i1_grad",
    "Pow(i0 i1_grad) -> i0_grad",
    "Mul(i0_grad o0_grad) -> i0_grad",
    "Mul(i0_grad i1) -> i0_grad",
    "Log(i0) -> i1_grad_autogen_pre_red",
    "Mul(i1_grad_autogen_pre_red o0) -> i1_grad_autogen_pre_red",
    "Mul(i1_grad_autogen_pre_red o0_grad) -> i1_grad",
]
POW_BROADCAST = [
    *POW_BLOB[:2],
    "Pow(i0 i1_grad) -> i0_grad {broadcast=1 axis=1 axis_str=b'' order=b'NCHW'}",
    POW_BLOB[3],
    "Mul(i0_grad i1) -> i0_grad {broadcast=1 axis=1 axis_str=b'' order=b'NCHW'}",
    *POW_BLOB[5:7],
    "Mul(i1_grad_autogen_pre_red o0_grad) -> i1_grad_autogen_pre_red",
    "SumReduceLike(i1_grad_autogen_pre_red i1) -> i1_grad {axis=1 axis_str=b'' order=b'NCHW'}",
]
WITH_ARGUMENTS: list[tuple[str, int, int, dict[str, Any], list[str], str]] = [
    ("Gather", 2, 1, {"dense_gradient": 1}, ["SparseToDense(i1 o0_grad i0) -> i0_grad "
"{dense_gradient=1}"], "i0_grad -"),
    ("Gather", 2, 1, {"axis": 1}, ["BatchGatherGradient(i0 i1 o0_grad) -> i0_grad {axis=1 "
"axis=1}"], "i0_grad -"),
    ("Pow", 2, 1, {}, POW_BLOB, "i0_grad i1_grad"),
    ("Pow", 2, 1, {"broadcast": 1, "axis": 1}, POW_BROADCAST, "i0_grad i1_grad"),
    ("DotProductWithPadding", 2, 1, {"pad_value": 2.0}, [
        "DotProductWithPaddingGradient(i0 i1 o0_grad) -> i0_grad i1_grad {pad_value=2.0 "
"replicate=0 pad_value=2.0}"
    ], "i0_grad i1_grad"),
    ("GatherByKey", 3, 1, {"pack_first_input": 1}, [
        "Partition(i0 o0_grad) -> _i1_grad_keys i1_grad _i2_grad_keys i2_grad {pack_first_input=1 "
"pack_first_input=1}"
    ], "- i1_grad i2_grad"),
    ("InstanceNorm", 3, 2, {}, ["InstanceNormGradient(i0 i1 i2 o0_grad o1) -> i0_grad i1_grad "
"i2_grad"],
     "i0_grad i1_grad i2_grad"),
    ("Cast", 1, 1, {"to": "float", "from_type": "int32"}, ["Cast(o0_grad) -> i0_grad {to=2 "
"from_type=1}"], "i0_grad"),
]  # fmt: skip
"""Cases whose arguments decide which operators there are."""


def gradient_of(
    kind: str,
    inputs: int,
    outputs: int,
    arguments: dict[str, Any] | None = None,
    given: Sequence[int] = (),
) -> tuple[list[OperatorDef], list[Any]]:
    """Return the gradient operators of an operator, and the gradients of its inputs.

    Args:
        kind: its type.
        inputs, outputs: their numbers.
        arguments: its arguments; by default the table's.
        given: the outputs that have a gradient; by default all.
    """
    made = core.CreateOperator(
        kind,
        [f"i{number}" for number in range(inputs)],
        [f"o{number}" for number in range(outputs)],
        **(ARGUMENTS.get(kind, {"my_arg": 3}) if arguments is None else arguments),
    )
    chosen = given or range(outputs)
    names = [f"o{number}_grad" if number in chosen else None for number in range(outputs)]
    return GradientRegistry.GetGradientForOp(made, names)


def _text(made: OperatorDef) -> str:
    given = " ".join(f"{argument.name}={argument.ListFields()[1][1]}" for argument in made.arg)
    ending = f" {{{given}}}" if given else ""
    return f"{made.type}({' '.join(made.input)}) -> {' '.join(made.output)}{ending}"


def _name(gradient: Any) -> str:
    if isinstance(gradient, core.GradientSlice):
        return f"{gradient.indices},{gradient.values}"
    return "-" if gradient is None else str(gradient)


def test_gradient_operators_are_those_of_caffe2() -> None:
    for row in (row for row in ROWS if row["kind"] == "GRADIENT"):
        operators, gradients = gradient_of(row["operator"], int(row["inputs"]), int(row["outputs"]))
        assert "; ".join(map(_text, operators)) == row["gradient_operators"], row
        assert " ".join(map(_name, gradients)) == row["gradients"], row
        assert all(made.is_gradient_op for made in operators), row


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "arguments", "made", "gradients"), WITH_ARGUMENTS
)
def test_arguments_that_decide_on_the_gradient_operators(
    kind: str, inputs: int, outputs: int, arguments: dict[str, Any], made: list[str], gradients: str
) -> None:
    operators, found = gradient_of(kind, inputs, outputs, arguments)
    assert [_text(one) for one in operators] == made
    assert " ".join(map(_name, found)) == gradients


def test_outputs_without_a_gradient() -> None:
    # the gradient of the sizes goes nowhere
    assert gradient_of("Concat", 2, 2, given=[1]) == ([], [None, None])
    (made,), _ = gradient_of("SplitByLengths", 2, 3, {}, given=[0, 2])
    assert _text(made) == "Concat(o0_grad o2_grad) -> i0_grad _i0_grad_dims"
    with pytest.raises(Exception, match="the gradient of the output o1 is missing"):
        gradient_of("QuantDecode", 3, 2, given=[0])


def test_operators_without_gradient_end_a_path() -> None:
    for kind in (row["operator"] for row in ROWS if row["kind"] == "NO_GRADIENT"):
        known = find(kind)
        inputs, outputs = known.inputs[0], max(known.outputs[0], min(known.outputs[1], 1))
        assert gradient_of(kind, inputs, outputs) == ([], [None] * inputs), kind


def test_all_other_operators_refuse_a_gradient() -> None:
    allowed = {row["operator"] for row in ROWS if row["kind"] in ("GRADIENT", "NO_GRADIENT")}
    differentiable = {name for name in registered() if find(name).gradient is not None}
    assert differentiable - allowed == NOT_IN_THE_TABLE
    for sparse in ("SparseSortedSegmentWeightedSum", "SparseUnsortedSegmentWeightedSum"):
        with pytest.raises(Exception, match="has no gradient of its weights"):
            gradient_of(sparse, 4, 1, {"grad_on_weights": 1})
    with pytest.raises(Exception, match=r"gradient for \[Accuracy\]:the operator Accuracy"):
        gradient_of("Accuracy", 2, 1)
