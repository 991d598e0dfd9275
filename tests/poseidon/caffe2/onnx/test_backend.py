"""ONNX nodes and models as nets of Caffe2, against onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from poseidon.caffe2 import workspace
from poseidon.caffe2.onnx import backend
from poseidon.caffe2.onnx.nodes import CONVERTERS
from poseidon.caffe2.predictor import mobile_exporter
from poseidon.errors import DefinitionError, UsageError
from tests.support.caffe2_operators import numbers

Array = NDArray[Any]
X = numbers(2, 4, 6, 5)
POSITIVE = np.abs(X)
C = numbers(4, seed=1)
INTS = np.array([[2, 0, 1], [1, 1, -1]])


@dataclass(frozen=True)
class Case:
    """A node.

    Attributes:
        kind: its type.
        inputs: arrays; None for one that is left out.
        attributes: of the node.
        constants: the numbers of the inputs that are constants of the model.
        opset: the version of the operators.
        outputs: their number.
    """

    kind: str
    inputs: Sequence[Array | None] = (X,)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    constants: Sequence[int] = ()
    opset: int = 18
    outputs: int = 1

    def __str__(self) -> str:
        return f"{self.kind}-{self.opset}"

    @property
    def given(self) -> dict[str, Array]:
        """The inputs that are not constants, by name."""
        return {
            f"x{index}": value
            for index, value in enumerate(self.inputs)
            if value is not None and index not in self.constants
        }

    def model(self) -> Any:
        """Return the model of this node."""
        names = ["" if value is None else f"x{index}" for index, value in enumerate(self.inputs)]
        node = helper.make_node(
            self.kind, names, [f"y{index}" for index in range(self.outputs)], **self.attributes
        )
        return model_of(
            [node],
            self.given,
            [f"y{index}" for index in range(self.outputs)],
            {
                f"x{index}": value
                for index, value in enumerate(self.inputs)
                if value is not None and index in self.constants
            },
            self.opset,
        )


def model_of(
    nodes: Sequence[Any],
    given: Mapping[str, Array],
    outputs: Sequence[str],
    constants: Mapping[str, Array],
    opset: int = 18,
) -> Any:
    graph = helper.make_graph(
        nodes,
        "case",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
            )
            for name, value in given.items()
        ],
        [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    inferred = onnx.shape_inference.infer_shapes(made)
    for own, found in zip(made.graph.output, inferred.graph.output, strict=True):
        own.CopyFrom(found)
    return made


def window(**more: Any) -> dict[str, Any]:
    return {"kernel_shape": [3, 2], "strides": [2, 1], **more}


W = numbers(6, 2, 3, 2, seed=2)
WT = numbers(4, 3, 3, 2, seed=2)
ROWS = numbers(3, 4)
L = np.array
CASES = [
    *(
        Case(kind)
        for kind in ("Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "Neg", "Relu", "Sigmoid", "Sign")
    ),
    *(
        Case(kind)
        for kind in (
            "Softplus",
            "Softsign",
            "Tanh",
            "Identity",
            "Shape",
            "Reciprocal",
            "Size",
            "Mish",
        )
    ),
    *(Case(kind) for kind in ("Atan", "Cosh", "Sin", "Sinh", "Tan")),
    *(Case(kind, [X / 4]) for kind in ("Acos", "Asin")),
    *(Case(kind, [POSITIVE]) for kind in ("Log", "Sqrt")),
    *(
        Case(kind, [X, numbers(4, 1, 5, seed=1)])
        for kind in ("Add", "Sub", "Mul", "Div", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")
    ),
    Case("Equal", [INTS, L([[2, 1, 1]])]),
    *(Case(kind, [X > 0, X > -1]) for kind in ("And", "Or", "Xor")),
    Case("Not", [X > 0]),
    *(Case(kind, [X, 2 * X, X - 1]) for kind in ("Max", "Min", "Sum", "Mean")),
    Case("Pow", [POSITIVE, L(2.5, dtype="float32")], constants=[1]),
    Case("Pow", [POSITIVE, POSITIVE]),
    Case("LeakyRelu"),
    Case("LeakyRelu", attributes={"alpha": 0.3}),
    Case("Elu", attributes={"alpha": 0.5}),
    Case("Selu"),
    Case("ThresholdedRelu"),
    Case("HardSigmoid"),
    Case("HardSigmoid", attributes={"alpha": 0.3, "beta": 0.4}),
    Case("HardSwish"),
    Case("Gelu", opset=20),
    Case("Gelu", attributes={"approximate": "tanh"}, opset=20),
    Case("PRelu", [X, C.reshape(4, 1, 1)], constants=[1]),
    Case("PRelu", [X, C[:1]], constants=[1]),
    Case("Clip", [X, L(-0.5, dtype="float32"), L(0.5, dtype="float32")], constants=[1, 2]),
    Case("Clip", [X, None, L(0.5, dtype="float32")], constants=[2]),
    Case("Clip", attributes={"min": 0.0, "max": 0.3}, opset=6),
    Case("Cast", [X], {"to": TensorProto.INT64}),
    Case("Cast", [X], {"to": TensorProto.DOUBLE}),
    Case("Cast", [X > 0], {"to": TensorProto.FLOAT}),
    Case("Dropout"),
    *(
        Case("Shape", attributes=limits, opset=15)
        for limits in ({"start": -3}, {"end": 2}, {"start": 1, "end": -1})
    ),
    Case("MatMul", [C, 2 * C]),
    Case("Dropout", attributes={"ratio": 0.3}, opset=7),
    Case("Where", [X > 0, X, 2 * X]),
    Case("Where", [X > 0, X, L(0.0, dtype="float32")], constants=[2]),
    Case("Reshape", [X, L([0, -1, 5])], constants=[1]),
    Case("Reshape", [X, L([8, 30])]),
    Case("Flatten"),
    Case("Flatten", attributes={"axis": -1}),
    Case("Flatten", attributes={"axis": 2}),
    Case("Transpose"),
    Case("Transpose", attributes={"perm": [0, 2, 3, 1]}),
    Case("Squeeze", [X[:, :1], L([1])], constants=[1]),
    Case("Squeeze", [X[:1, :1]]),
    Case("Squeeze", [X[..., :1]], {"axes": [-1]}, opset=11),
    Case("Unsqueeze", [X, L([0, -1])], constants=[1]),
    Case("Unsqueeze", [X], {"axes": [2]}, opset=11),
    Case("Concat", [X, 2 * X], {"axis": -1}),
    Case("Concat", [X, 2 * X], {"axis": 0}),
    Case("Split", [X, L([1, 3])], {"axis": 1}, [1], outputs=2),
    Case("Split", [X], {"axis": 2, "num_outputs": 4}, outputs=4),
    Case("Split", [X], {"axis": -2, "split": [2, 4]}, opset=11, outputs=2),
    Case("Split", [X], {"axis": 1}, opset=11, outputs=2),
    Case("Slice", [X, L([1, -3]), L([4, 2**31 - 1]), L([1, 3])], constants=[1, 2, 3]),
    Case("Slice", [X, L([0]), L([-1]), L([-1])], constants=[1, 2, 3]),
    Case("Slice", [X, L([1]), L([2**63 - 1]), L([0]), L([1])], constants=[1, 2, 3, 4]),
    Case("Slice", [X], {"starts": [0, -2], "ends": [1, -1], "axes": [0, 2]}, opset=9),
    *(
        Case("DepthToSpace", [numbers(2, 12, 3, 2)], {"blocksize": 2, "mode": mode})
        for mode in ("DCR", "CRD")
    ),
    Case("SpaceToDepth", [numbers(2, 3, 4, 6)], {"blocksize": 2}),
    Case("Gather", [X, L([[2, 0], [1, 1]])], {"axis": 1}),
    Case("Gather", [X, L(-1)], {"axis": -1}),
    Case("ConstantOfShape", [L([2, 3])]),
    Case("ConstantOfShape", [L([2, 3])], {"value": numpy_helper.from_array(L([7]))}),
    Case("Expand", [ROWS[:1], L([3, 1])], constants=[1]),
    Case("Tile", [ROWS, L([2, 3])]),
    Case("Range", [L(1), L(9), L(3)]),
    Case("Pad", [X, L([0, 0, 1, 2, 0, 0, 0, 1]), L(0.5, dtype="float32")], constants=[1, 2]),
    Case("Pad", [X], {"pads": [0, 0, 1, 2, 0, 0, 0, 1], "mode": "reflect"}, opset=10),
    Case("Conv", [X, numbers(6, 4, 3, 2)], window(pads=[1, 0, 2, 1])),
    Case("Conv", [X, W, numbers(6)], window(group=2, dilations=[1, 2])),
    Case("Conv", [X, W], window(group=2, auto_pad="SAME_UPPER")),
    Case("Conv", [X[..., 0], numbers(3, 4, 2)], {"kernel_shape": [2]}),
    Case("ConvTranspose", [X, WT, numbers(3)], window(pads=[1, 0, 1, 0], output_padding=[1, 0])),
    Case("MaxPool", attributes=window(pads=[1, 0, 1, 1])),
    Case("MaxPool", attributes=window(ceil_mode=1)),
    Case("MaxPool", attributes=window(auto_pad="SAME_UPPER")),
    Case("AveragePool", attributes=window(pads=[1, 0, 1, 1])),
    Case("AveragePool", attributes=window(pads=[1, 1, 1, 1], count_include_pad=1)),
    Case("AveragePool", attributes=window(auto_pad="VALID")),
    Case("LpPool", attributes=window(p=3)),
    Case("GlobalAveragePool"),
    Case("GlobalMaxPool"),
    Case("Upsample", [X, L([1, 1, 2, 3], dtype="float32")], {"mode": "nearest"}, [1], opset=9),
    Case("Upsample", [X], {"mode": "nearest", "scales": [1.0, 1.0, 2.0, 1.5]}, opset=7),
    Case(
        "Resize",
        [X, None, L([1, 1, 2, 3], dtype="float32")],
        {
            "mode": "nearest",
            "coordinate_transformation_mode": "asymmetric",
            "nearest_mode": "floor",
        },
        [2],
    ),
    Case("Resize", [X, None, L([1, 1, 2, 3], dtype="float32")], {"mode": "nearest"}, [2]),
    Case(
        "Resize",
        [X, None, None, L([2, 4, 12, 9])],
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
        [3],
    ),
    Case(
        "BatchNormalization",
        [X, C, numbers(4), numbers(4, seed=5), np.abs(C)],
        {"epsilon": 1e-3},
        [1, 2, 3, 4],
    ),
    Case(
        "BatchNormalization", [ROWS, C, numbers(4), numbers(4, seed=5), np.abs(C)], {}, [1, 2, 3, 4]
    ),
    Case("InstanceNormalization", [X, C, numbers(4)]),
    Case("LRN", attributes={"size": 3, "alpha": 0.2}),
    Case("LayerNormalization", [X, numbers(5), numbers(5, seed=1)]),
    Case("LayerNormalization", [X, numbers(6, 5)], {"axis": 2}),
    Case("Softmax"),
    Case("Softmax", opset=11),
    Case("Softmax", attributes={"axis": 1}),
    Case("Softmax", [ROWS], {"axis": 1}),
    Case("LogSoftmax", attributes={"axis": -3}),
    Case("LogSoftmax", [ROWS], opset=11),
    Case("MatMul", [ROWS, ROWS.T]),
    Case("MatMul", [X, numbers(5, 3)]),
    Case("MatMul", [X, C[:1].repeat(5)]),
    Case("Gemm", [ROWS, numbers(2, 4), numbers(2)], {"transB": 1}),
    Case("Gemm", [ROWS, numbers(4, 2), numbers(2)]),
    Case("Gemm", [ROWS, numbers(4, 2)]),
    Case(
        "Gemm",
        [ROWS.T, numbers(4, 2).T, numbers(1, 2)],
        {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0},
    ),
    Case("Gemm", [ROWS, numbers(4, 2)], {"alpha": 0.5}),
    *(
        Case(kind, [X, L([1, -1])], constants=[1])
        for kind in ("ReduceMean", "ReduceMax", "ReduceL1", "ReduceL2", "ReduceSumSquare")
    ),
    Case("ReduceSum", [X, L([1])], {"keepdims": 0}, [1]),
    Case("ReduceMin", [X], {"axes": [2, 3], "keepdims": 0}, opset=11),
    Case("ReduceMean"),
    Case("ReduceLogSum", [POSITIVE]),
    Case("ReduceSum", attributes={"noop_with_empty_axes": 1}),
    Case("ArgMax"),
    Case("ArgMin", attributes={"axis": -1, "keepdims": 0}),
    Case("TopK", [X, L([2])], {"axis": 1}, [1], outputs=2),
    Case("TopK", [X], {"k": 3}, opset=9, outputs=2),
]


def recurrent(
    kind: str, gates: int, *, both: bool = False, states: bool = False, **attributes: Any
) -> Case:
    """Return a node over sequences of 5 steps: a batch of 3, inputs of 4, 2 units."""
    directions = 2 if both else 1
    inputs: list[Array | None] = [
        numbers(5, 3, 4),
        numbers(directions, 2 * gates, 4, seed=1),
        numbers(directions, 2 * gates, 2, seed=2),
        numbers(directions, 4 * gates, seed=3),
    ]
    if states:
        count = 2 if kind == "LSTM" else 1
        inputs += [None, *(numbers(directions, 3, 2, seed=4 + place) for place in range(count))]
    if both:
        attributes["direction"] = "bidirectional"
    outputs = 3 if kind == "LSTM" else 2
    return Case(kind, inputs, {"hidden_size": 2, **attributes}, (1, 2, 3), outputs=outputs)


CASES += [
    *(
        recurrent("LSTM", 4, both=both, states=states)
        for both in (False, True)
        for states in (False, True)
    ),
    recurrent("LSTM", 4, direction="reverse"),
    *(
        recurrent("GRU", 3, both=both, linear_before_reset=before)
        for both in (False, True)
        for before in (0, 1)
    ),
    recurrent("RNN", 1, both=True, states=True),
    recurrent("RNN", 1, activations=["Relu"]),
    Case(
        "LSTM", [numbers(5, 3, 4), numbers(1, 8, 4), numbers(1, 8, 2)], {"hidden_size": 2}, (1, 2)
    ),
]


def assert_same(found: Sequence[Array], wanted: Sequence[Array]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-6)


def runtime(model: Any, given: Mapping[str, Array]) -> list[Array]:
    found: list[Array] = onnxruntime.InferenceSession(model.SerializeToString()).run(
        None, dict(given)
    )
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_node_computes_what_onnxruntime_computes(case: Case) -> None:
    model = case.model()
    onnx.checker.check_model(model, full_check=True)
    assert_same(backend.run_model(model, case.given), runtime(model, case.given))


def test_every_converter_is_tested() -> None:
    assert {case.kind for case in CASES} == set(CONVERTERS)


def test_the_older_broadcasting() -> None:
    """onnxruntime has no versions before 7."""
    for attributes, wanted in (
        ({"broadcast": 1, "axis": 1}, X + C[:, None, None]),
        ({"broadcast": 1}, X + C[:1]),
    ):
        second = C if "axis" in attributes else C[:1]
        case = Case("Add", [X, second], attributes, opset=6)
        node = case.model().graph.node[0]
        assert_same(backend.run_node(node, case.inputs, opset_version=6), [wanted])


def net() -> Any:
    """Return a model of several nodes: a convolution and a classifier, whose shape is computed."""
    return model_of(
        [
            helper.make_node("Conv", ["data", "w", "b"], ["1"], kernel_shape=[3, 2], group=2),
            helper.make_node("Relu", ["1"], ["2"]),
            helper.make_node("Shape", ["2"], ["3"]),
            helper.make_node("Constant", [], ["4"], value_int=0),
            helper.make_node("Gather", ["3", "4"], ["5"]),
            helper.make_node("Unsqueeze", ["5", "zero"], ["6"]),
            helper.make_node("Constant", [], ["7"], value_ints=[-1]),
            helper.make_node("Concat", ["6", "7"], ["8"], axis=0),
            helper.make_node("Reshape", ["2", "8"], ["9"]),
            helper.make_node("Gemm", ["9", "v", "c"], ["scores"]),
            helper.make_node("Softmax", ["scores"], ["probabilities"]),
        ],
        {"data": X},
        ["probabilities", "scores"],
        {"w": W, "b": numbers(6), "v": numbers(96, 3) / 10, "c": numbers(3), "zero": np.array([0])},
    )


def test_a_model_runs_as_a_net_of_caffe2() -> None:
    model = net()
    wanted = runtime(model, {"data": X})
    prepared = backend.prepare(model)
    for given in (X, [X], (X,), {"data": X}):
        outputs = prepared.run(given)
        assert_same(outputs, wanted)
    assert outputs.probabilities is outputs["probabilities"] is outputs[0]
    assert prepared.uninitialized == ["data"]
    assert list(prepared.predict_net.external_input) == ["data", "w", "b", "v", "c", "4", "7"]
    assert list(prepared.predict_net.external_output) == ["probabilities", "scores"]
    with pytest.raises(RuntimeError, match="2 inputs are given; the model has 1: data"):
        prepared.run([X, X])


def test_its_nets_are_those_of_a_mobile_device() -> None:
    """As in PyTorch's tutorial of the super resolution net."""
    model = net()
    prepared = backend.prepare(model)
    predict = prepared.predict_net
    made = mobile_exporter.Export(prepared.workspace, predict, predict.external_input)
    workspace.ResetWorkspace()
    for part in made:
        workspace.RunNetOnce(part)
    workspace.FeedBlob("data", X)
    workspace.RunNetOnce(made[1])
    assert_same([workspace.FetchBlob("scores")], runtime(model, {"data": X})[1:])
    init, predict = backend.Caffe2Backend.onnx_graph_to_caffe2_net(model)
    (scores,) = [
        value
        for name, value in zip(
            predict.external_output, workspace.Predictor(init, predict).run([X]), strict=True
        )
        if name == "scores"
    ]
    assert_same([scores], runtime(model, {"data": X})[1:])


def test_what_has_no_form_is_named() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p", "places"], kernel_shape=[2, 2]),
        helper.make_node("Hardmax", ["p"], ["h"]),
        helper.make_node("Slice", ["h", "starts", "ends", "axes", "steps"], ["y"]),
    ]
    one = np.array([1])
    constants = {"starts": 0 * one, "ends": 9 * one, "axes": one, "steps": 2 * one}
    model = model_of(nodes, {"x": X}, ["y", "places"], constants)
    with pytest.raises(DefinitionError) as caught:
        backend.prepare(model)
    assert str(caught.value) == (
        "the model 'case' has operators without a form in Caffe2: MaxPool (p): Caffe2 has no output "
        "places; Hardmax (h); Slice (y): Caffe2 has no steps [2]. Run it with onnxruntime"
    )
    assert not backend.is_compatible(model) and backend.is_compatible(net())


@pytest.mark.parametrize(
    ("kind", "inputs", "attributes", "why"),
    [
        ("Clip", [X, X[0, 0, 0, 0]], {}, None),
        (
            "Conv",
            [X, W],
            {"auto_pad": "SAME_LOWER", "group": 2},
            "Caffe2 has no auto_pad=SAME_LOWER",
        ),
        ("Pad", [X, np.array([1, 0, 0, 0, 0, 0, 0, 0])], {}, "pads height and width of images"),
        ("Resize", [X, None, np.ones(4, "float32") * 2], {}, "resizes height and width of images"),
        ("Reshape", [X, np.array([0, -1])], {"allowzero": 1}, "Caffe2 has no allowzero=1"),
        ("Dropout", [X, np.float32(0.5), np.array(True)], {}, "it is in training mode"),
        ("AveragePool", [X], {"kernel_shape": [2, 2], "dilations": [2, 2]}, "no dilations of"),
        (
            *("MaxPool", [X], {"kernel_shape": [1, 1], "strides": [2, 2], "ceil_mode": 1}),
            "kernels that are at least the stride only",
        ),
        ("SpaceToDepth", [X], {"blocksize": 1, "mode": "CRD"}, "Caffe2 has no mode=CRD"),
        ("TopK", [X, np.array([1])], {"largest": 0}, "Caffe2 has no largest=0"),
        ("Hardmax", [X], {}, "Hardmax has no form in Caffe2$"),
        ("LSTM", [X] * 8, {}, "Caffe2 has no padding of shorter sequences"),
        ("GRU", [X[0]] * 3, {"activations": ["Relu", "Tanh"]}, "no GRU with the activations relu"),
        ("RNN", [X[0]] * 3, {"clip": 1.0}, "Caffe2 has no clip=1.0"),
    ],
)
def test_settings_without_a_form(
    kind: str, inputs: list[Any], attributes: dict[str, Any], why: str | None
) -> None:
    names = ["" if value is None else f"x{place}" for place, value in enumerate(inputs)]
    node = helper.make_node(kind, names, ["y"], **attributes)
    given = [value for value in inputs if value is not None]
    if why is None:
        backend.run_node(node, given)
        return
    with pytest.raises(DefinitionError, match=why):
        backend.run_node(node, given)


def test_outputs_that_none_reads_may_lack() -> None:
    """As the masks of Dropout in ONNX's zoo."""
    nodes = [
        helper.make_node("Dropout", ["x"], ["y", "mask"]),
        helper.make_node("MaxPool", ["y"], ["z", "places"], kernel_shape=[2, 2]),
    ]
    model = model_of(nodes, {"x": X}, ["z"], {}, 9)
    assert_same(backend.run_model(model, X), runtime(model, {"x": X}))


def test_computed_settings_have_no_form() -> None:
    case = Case("Clip", [X, np.array(0, "float32")])
    with pytest.raises(DefinitionError, match="its min is computed, not constant"):
        backend.prepare(case.model())


def test_caffe2s_own_operators_stay() -> None:
    node = helper.make_node(
        "AffineChannel", ["x", "s", "b"], ["y"], domain="org.pytorch._caffe2", order="NCHW"
    )
    (y,) = backend.run_node(node, [X, C, C])
    np.testing.assert_allclose(y, (X * C[:, None, None] + C[:, None, None]), rtol=1e-6)


def test_devices() -> None:
    assert backend.supports_device("CPU") and not backend.supports_device("TPU")
    assert not backend.supports_device("CUDA:999")
    with pytest.raises(UsageError, match="there is no device TPU; use CPU, CUDA or CUDA:1"):
        backend.prepare(net(), device="TPU")
