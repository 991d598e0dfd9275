"""The contract of operators: signature as schema, arguments, errors, gradient rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from poseidon.caffe2 import workspace
from poseidon.caffe2.core import CreateOperator
from poseidon.caffe2.operators import registry
from poseidon.caffe2.operators.gradients import GradientMaker, Sparse, parse_rule
from poseidon.caffe2.operators.registry import Context, find, nearest, operator
from poseidon.caffe2.runtime.bind import function_of


@dataclass(frozen=True)
class Limits:
    low: float = 0.5
    steps: tuple[int, ...] = ()


LIMITS = Limits()


@pytest.fixture
def example() -> Iterator[None]:
    @operator("ExampleForTests", gradient="ExampleGradient(I0, GO0) -> GI0")
    def function(
        x: Tensor,
        y: Tensor | None = None,
        *,
        context: Context,
        size: int,
        min_: float = 0.5,
        names: list[str] = [],  # noqa: B006
        limits: Limits = LIMITS,
    ) -> tuple[Tensor, Tensor]:
        return x + size, x * min_

    yield
    del registry._operators["ExampleForTests"]


@pytest.mark.usefixtures("example")
def test_the_signature_is_the_schema() -> None:
    found = find("ExampleForTests")
    assert found.inputs == (1, 2)
    assert found.outputs == (1, 2)
    assert not found.single
    assert found.context == "context"
    assert sorted(found.parameters) == ["low", "min", "names", "size", "steps"]


@pytest.mark.usefixtures("example")
def test_arguments_are_converted_and_unknown_ones_ignored() -> None:
    definition = CreateOperator(
        "ExampleForTests", "x", "y", size=3, min=1, names=["a", "b"], order="NCHW"
    )
    wanted = {"size": 3, "min_": 1.0, "names": ["a", "b"]}
    assert find("ExampleForTests").arguments(definition) == wanted


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(
    ("inputs", "arguments", "message"),
    [
        (["x"], {}, "the argument size is required"),
        (["x"], {"size": "three"}, "the argument size has no value of type int"),
        (["x", "y", "z"], {"size": 3}, "3 inputs are given, 1 to 2 expected"),
        ([], {"size": 3}, "0 inputs are given, 1 to 2 expected"),
    ],
)
def test_a_mistake_is_one_sentence(
    inputs: list[str], arguments: dict[str, object], message: str
) -> None:
    definition = CreateOperator("ExampleForTests", inputs, "y", **arguments)
    with pytest.raises(ValueError, match=message):
        find("ExampleForTests").check(definition)
        find("ExampleForTests").arguments(definition)


def test_an_unknown_operator_names_the_nearest() -> None:
    assert nearest("Relo")[0] == "Relu"
    with pytest.raises(KeyError, match="there is no operator Relo; the nearest are Relu"):
        find("Relo")


@pytest.mark.parametrize(
    ("rule", "operators", "gradients"),
    [
        ("G(I0, O0, GO0) -> GI0", ["G(x, y, dy) -> x_grad"], ["x_grad", None]),
        ("G(I*, GO*) -> GI*", ["G(x, w, dy) -> x_grad,w_grad"], ["x_grad", "w_grad"]),
        ("G(I2?, GO0) -> GI1, _GI1_dims", ["G(dy) -> w_grad,_w_grad_dims"], [None, "w_grad"]),
        (
            "A(GO0) -> GI0 {scale=2.0}; B(GI0) -> GI0",
            ["A(dy) -> x_grad", "B(x_grad) -> x_grad"],
            ["x_grad", None],
        ),
        ("GI0 = GO0", [], ["dy", None]),
        ("GI0 = (I1, GO0)", [], [Sparse("w", "dy"), None]),
        ("", [], [None, None]),
    ],
)
def test_rules(rule: str, operators: list[str], gradients: list[object]) -> None:
    maker = GradientMaker(CreateOperator("F", ["x", "w"], ["y"], axis=1), ["dy"])
    parse_rule(rule)(maker)
    assert [
        f"{op.type}({', '.join(op.input)}) -> {','.join(op.output)}" for op in maker.operators
    ] == operators
    assert maker.gradients == gradients
    assert all(op.is_gradient_op for op in maker.operators)
    assert all(op.arg[0].name == ("scale" if op.type == "A" else "axis") for op in maker.operators)


@pytest.mark.parametrize("rule", ["G(X0) -> GI0", "G(I0)", "GI0 <- GO0"])
def test_what_is_no_rule_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="no"):
        parse_rule(rule)(GradientMaker(CreateOperator("F", ["x"], ["y"]), ["dy"]))


def test_a_missing_gradient_is_named() -> None:
    maker = GradientMaker(CreateOperator("F", ["x"], ["y", "z"]), ["dy", None])
    with pytest.raises(ValueError, match="the gradient of the output z is missing"):
        parse_rule("G(GO1) -> GI0")(maker)


def test_no_operator_is_registered_by_two_modules() -> None:
    assert workspace.RegisteredOperators()
    assert registry.registered_twice == []


def test_torchs_own_function_is_called_where_no_argument_is_given() -> None:
    plain = function_of(CreateOperator("Add", ["a", "b"], "y"), None)
    assert plain is torch.add
    assert function_of(CreateOperator("Add", ["a", "b"], "y", broadcast=1), None) is not torch.add


DEFAULTS = """
APMeter buffer_size=1000
Adadelta epsilon=1e-5 decay=0.95
Adagrad epsilon=1e-5 decay=1
Adam beta1=0.9 beta2=0.999 epsilon=1e-5
BBoxTransform apply_scale=1
BatchSparseToDense dense_last_dim=-1 default_value=0
BatchToSpace block_size=2
BoxWithNMSLimit score_thresh=0.05 nms=0.3 detections_per_im=100 soft_nms_sigma=0.5
CTCBeamSearchDecoder beam_width=10 num_candidates=1
CTCGreedyDecoder merge_repeated=1
CollectAndDistributeFpnRpnProposals roi_canonical_scale=224 roi_canonical_level=4 roi_max_level=5
CosineEmbeddingCriterion margin=0
DecayAdagrad beta1=0.9 epsilon=1e-5 bias_correction_first=1
Dropout ratio=0.5
Elu alpha=1
FC axis=1 axis_w=1
Ftrl alpha=0.005 beta=1 lambda1=0.001 lambda2=0.001
GatherRangesToDense min_observation=10000 max_mismatched_ratio=1 max_empty_ratio=1
GenerateProposals spatial_scale=0.0625 pre_nms_topN=6000 post_nms_topN=300 nms_thresh=0.7
GroupNorm group=32 epsilon=1e-5
GroupSpatialSoftmax num_classes=81
HSoftmaxSearch beam=0.01
HardSigmoid alpha=0.2 beta=0.5
ImageInput img_saturation=0.4 img_brightness=0.4 img_contrast=0.4 color_lighting_std=0.1
InstanceNorm epsilon=1e-5
LRN size=0 alpha=0 beta=0 bias=1
Lars offset=0.5 lr_min=0.02
LayerNorm axis=1 epsilon=1e-5
LeakyRelu alpha=0.01
LearningRateAdaption lr_alpha=0.01 normalized_lr_adaption=1
LengthsPad padding_value=-1
LengthsToWeights power=0.5
Logit eps=1e-6
LpNorm p=2 average=0
LpPool p=2
MarginRankingCriterion margin=1
MatMul axis_a=1 axis_b=1
MomentumSGD momentum=0 nesterov=0
Quantile quantile=1 abs=1 tol=0.001
RMACRegions scales=3 overlap=0.4
ReluN n=6
RmsProp decay=0.9 momentum=0 epsilon=1e-5
RoIAlign spatial_scale=1 pooled_h=1 pooled_w=1 sampling_ratio=-1 aligned=0
Selu alpha=1.6732632423543772 scale=1.0507009873554805
SequenceMask axis=1 radius=10 grad=0
SigmoidCrossEntropyLoss scale=1 normalize=1
SigmoidFocalLoss scale=1 alpha=0.25 gamma=1 num_classes=80
SinusoidPositionEncoding embedding_size=100 alpha=10000 amplitude=1
SmoothL1Loss beta=1 scale=1
SoftmaxFocalLoss scale=1 alpha=0.25 gamma=1 num_classes=81
SoftmaxWithLoss axis=1 scale=1 average_by_batch_size=0
SortAndShuffle sort_by_field_idx=1 batch_size=1 shuffle_size=1
SparseLpRegularizer p=2 reg_lambda=1e-5
SparseNormalize use_max_norm=1 norm=1
SpatialBN epsilon=1e-5 momentum=0.9 num_batches=1
Storm momentum=10 beta=0.1
ThresholdedRelu alpha=1
UpsampleNearest scale=2
Wngrad epsilon=1e-5
YellowFin beta=0.999 curv_win_width=20 epsilon=1e-6 nesterov=0 zero_debias=1
"""


def test_arguments_have_the_defaults_of_caffe2() -> None:
    for kind, *arguments in map(str.split, DEFAULTS.strip().splitlines()):
        for name, value in (argument.split("=") for argument in arguments):
            assert float(registry.find(kind).parameters[name].default) == float(value), (kind, name)


def test_gradients_have_the_defaults_of_their_operators() -> None:
    for kind in registry.registered():
        gradient = f"{kind}Gradient"
        if not registry.is_registered(gradient) or kind in ("SpatialBN", "RecurrentNetwork"):
            continue
        own, forward = (registry.find(name).parameters for name in (gradient, kind))
        for name in own.keys() & forward.keys():
            assert own[name].default == forward[name].default, (kind, name)
