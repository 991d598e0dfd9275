"""Loss weights, propagate_down, force_backward and shared blobs, each against the same
arithmetic by hand.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from poseidon.caffe.net.net import Net
from tests.support.nets import build, inputs, layer, noise

IP = "inner_product_param { num_output: 5 weight_filler { type: 'xavier' } bias_filler { type: 'uniform' } }"
X = noise(4, 5)
LABELS = torch.tensor([0.0, 1, 2, 3])
INPUT = inputs(x=(4, 5))
LABELLED = inputs(x=(4, 5), l=(4,))


def run(text: str, feed: dict[str, Tensor] | None = None) -> Net:
    net = build(text)
    net(feed or {"x": X})
    net.loss.backward()  # type: ignore[no-untyped-call]
    return net


def blobs(net: Net, name: str) -> list[Tensor]:
    return [
        blob.detach().clone().requires_grad_() for blob in dict(net.layer_modules)[name].blobs()
    ]


def gradient(net: Net, name: str, index: int = 0) -> Tensor:
    found = dict(net.layer_modules)[name].sources()[index].grad
    assert found is not None
    return found


def test_several_losses_on_shared_scores() -> None:
    text = LABELLED + layer("InnerProduct", "x", "y", IP, name="ip")
    text += layer("SoftmaxWithLoss", "y l", "a", "loss_weight: 0.3", name="a")
    text += layer("EuclideanLoss", "y x", "b", name="b")
    net = run(text, {"x": X, "l": LABELS})
    weight, bias = blobs(net, "ip")
    y = X @ weight.T + bias
    loss = 0.3 * torch.nn.functional.cross_entropy(y, LABELS.long()) + (y - X).square().sum() / 8
    torch.testing.assert_close(net.loss, loss)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(gradient(net, "ip"), weight.grad)
    assert net.plan.loss_weights == {"a": pytest.approx(0.3), "b": 1.0}


def test_propagate_down_false_stops_one_of_two_ways() -> None:
    """y reaches the loss by itself and through a layer whose way down is shut."""
    text = INPUT + layer("InnerProduct", "x", "y", IP, name="low")
    text += layer("InnerProduct", "y", "z", f"propagate_down: false {IP}", name="high")
    text += layer("Eltwise", "y z", "s", "loss_weight: 1", name="sum")
    net = run(text)
    low, high = blobs(net, "low"), blobs(net, "high")
    y = X @ low[0].T + low[1]
    (y + y.detach() @ high[0].T + high[1]).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(gradient(net, "low"), low[0].grad)
    torch.testing.assert_close(gradient(net, "high"), high[0].grad)


def test_nothing_below_a_shut_way_learns() -> None:
    text = INPUT + layer("InnerProduct", "x", "y", IP, name="low")
    net = run(
        text
        + layer("InnerProduct", "y", "z", f"propagate_down: false loss_weight: 1 {IP}", name="high")
    )
    low = dict(net.layer_modules)["low"].sources()
    assert [parameter.grad for parameter in low] == [None, None]


def test_force_backward_overrides_a_shut_way() -> None:
    text = INPUT + layer("InnerProduct", "x", "y", IP, name="low")
    text += layer(
        "InnerProduct", "y", "z", f"propagate_down: false loss_weight: 1 {IP}", name="high"
    )
    net = run("force_backward: true " + text)
    low, high = blobs(net, "low"), blobs(net, "high")
    y = X @ low[0].T + low[1]
    (y @ high[0].T + high[1]).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(gradient(net, "low"), low[0].grad)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("", "", (1.0, 1.0)),
        ("lr_mult: 2", "", (2.0, 1.0)),
        ("", "lr_mult: 2 decay_mult: 3", (2.0, 3.0)),
        ("lr_mult: 2 decay_mult: 0", "lr_mult: 2", (2.0, 0.0)),
        ("lr_mult: 0", "decay_mult: 0", (0.0, 0.0)),
    ],
)
def test_the_multipliers_of_a_shared_blob(
    first: str, second: str, expected: tuple[float, float]
) -> None:
    """Whoever sets one sets it for all; the sharer that says nothing agrees."""
    text = INPUT + layer("InnerProduct", "x", "y", f"param {{ name: 'w' {first} }} {IP}", name="a")
    net = build(
        text + layer("InnerProduct", "y", "z", f"param {{ name: 'w' {second} }} {IP}", name="b")
    )
    found = {info.name: (info.lr_mult, info.decay_mult) for info in net.parameters_info}
    assert found == {"a.0": expected, "a.1": (1.0, 1.0), "b.1": (1.0, 1.0)}


@pytest.mark.parametrize("mode", ["STRICT", "PERMISSIVE"])
def test_a_shared_blob_gets_the_sum_of_both_gradients(mode: str) -> None:
    text = INPUT + layer("InnerProduct", "x", "y", f"param {{ name: 'w' }} {IP}", name="a")
    shared = f"param {{ name: 'w' share_mode: {mode} }} loss_weight: 1"
    net = run(text + layer("InnerProduct", "y", "z", f"{shared} {IP}", name="b"))
    (weight, one), (_, two) = blobs(net, "a"), blobs(net, "b")
    ((X @ weight.T + one) @ weight.T + two).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(gradient(net, "a"), weight.grad)
    assert gradient(net, "b") is gradient(net, "a")


def test_force_backward_gives_frozen_blobs_a_gradient_but_statistics_none() -> None:
    text = "force_backward: true " + INPUT
    text += layer("InnerProduct", "x", "y", f"param {{ lr_mult: 0 }} {IP}", name="ip")
    text += layer("BatchNorm", "y", "n", name="norm") + layer(
        "Power", "n", "p", "loss_weight: 1", name="p"
    )
    net = run(text)
    assert gradient(net, "ip").shape == (5, 5)
    assert [info.statistics for info in net.parameters_info] == [False, False, True, True, True]
    assert all(parameter.grad is None for parameter in dict(net.layer_modules)["norm"].sources())


@pytest.mark.parametrize(
    ("phase", "body", "moved"),
    [
        (0, "", True),
        (0, "batch_norm_param { use_global_stats: true }", False),
        (1, "", False),
        (1, "batch_norm_param { use_global_stats: false }", True),
    ],
)
def test_statistics_are_those_that_forward_moves(phase: int, body: str, moved: bool) -> None:
    net = build(INPUT + layer("BatchNorm", "x", "n", body, name="norm"), phase=phase)
    before = [blob.clone() for blob in dict(net.layer_modules)["norm"].blobs()]
    net({"x": X})
    after = dict(net.layer_modules)["norm"].blobs()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) is moved
    assert {info.statistics for info in net.parameters_info} == {moved}
