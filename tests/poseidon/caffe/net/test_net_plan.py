"""The plan: slots, lifetimes, outputs, loss weights. (Its errors: test_compile.)"""

from __future__ import annotations

import pytest

from poseidon.caffe.layers.registry import layer_class
from poseidon.caffe.net.net_plan import NetPlan, plan_net
from tests.support.nets import definition, inputs, layer, stack

IP = "inner_product_param { num_output: 3 }"


def plan(text: str) -> NetPlan:
    return plan_net(definition(text), layer_class)


def test_a_blob_dies_with_its_last_reader() -> None:
    found = plan(
        stack(f"InnerProduct x=2,3 > a | {IP}")
        + layer("InnerProduct", "a", "b", IP)
        + layer("Eltwise", "a b", "c")
    )
    x, a, b = (found.names[name] for name in "xab")
    assert [set(step.dead) for step in found.steps] == [set(), {x}, set(), {a, b}]


def test_what_weighs_in_the_loss_lives_on() -> None:
    found = plan(stack("InnerProduct x=2,3 > a | loss_weight: 2") + layer("ReLU", "a", "b"))
    a = found.names["a"]
    assert found.losses == ((a, 2.0),)
    assert all(a not in step.dead for step in found.steps)


def test_in_place_makes_a_new_slot_under_the_old_name() -> None:
    found = plan(inputs(x=(2, 3)) + layer("ReLU", "x", "x") + layer("ReLU", "x", "x"))
    assert found.slots == 3 and found.names == {"x": 2}
    assert [step.bottoms for step in found.steps] == [(), (0,), (1,)]
    assert found.outputs == (("x", 2),)


@pytest.mark.parametrize(
    ("text", "overwrites"),
    [
        ("PRODUCT; ReLU a > a", True),
        ("PRODUCT; ReLU a > a; Dropout a > a", False),  # the ReLU's own backward reads its top
        ("ReLU x=2,3 > x", False),  # the caller's tensor is the caller's
        ("PRODUCT; ReLU a > b", False),  # both blobs are to be seen
    ],
)
def test_a_bottom_is_overwritten_only_in_place_and_if_its_maker_allows(
    text: str, overwrites: bool
) -> None:
    layers = text.replace("PRODUCT", f"InnerProduct x=2,3 > a | {IP}").replace("; ", "\n")
    assert plan(stack(layers)).steps[-1].overwrites == overwrites


def test_outputs_come_by_name() -> None:
    found = plan(inputs(b=(1,), Z=(1,), a=(1,)) + layer("ReLU", "b", "c"))
    assert [name for name, _ in found.outputs] == ["Z", "a", "c"]


@pytest.mark.parametrize(
    ("body", "tops", "weights"),
    [
        ("", "loss", {"loss": 1.0}),
        ("loss_weight: 0.5", "loss", {"loss": 0.5}),
        ("loss_weight: 0", "loss", {"loss": 0.0}),
        ("", "loss p", {"loss": 1.0, "p": 0.0}),
        ("loss_weight: 2 loss_weight: 0", "loss p", {"loss": 2.0, "p": 0.0}),
        ("loss_weight: 0 loss_weight: 3", "loss p", {"loss": 0.0, "p": 3.0}),
    ],
)
def test_loss_weights(body: str, tops: str, weights: dict[str, float]) -> None:
    found = plan(inputs(x=(2, 3), l=(2,)) + layer("SoftmaxWithLoss", "x l", tops, body))
    assert found.loss_weights == weights
    assert [weight for _, weight in found.losses] == [
        weight for weight in weights.values() if weight
    ]


def test_a_loss_may_leave_its_top_unnamed() -> None:
    found = plan(inputs(x=(2, 3), l=(2,)) + layer("SoftmaxWithLoss", "x l", ""))
    assert found.outputs == () and [weight for _, weight in found.losses] == [1.0]


def test_wanted_gradients() -> None:
    text = stack("Eltwise x=2,3 y=2,3 > z | propagate_down: true propagate_down: false")
    found = plan(text)
    assert found.wants_gradient == {found.names["x"]}
    assert found.steps[-1].cut == (False, True)
    forced = plan("force_backward: true " + inputs(x=(2, 3)) + layer("ReLU", "x", "y"))
    assert forced.wants_gradient == {forced.names["x"]}
