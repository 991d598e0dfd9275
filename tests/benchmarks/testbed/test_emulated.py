"""Nets that take time: order, sizes and values of gradients, and the accelerator's clock."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.testbed.emulated import GRADIENT, EmulatedLinear, EmulatedNet, Gradients, Pace
from poseidon.observe.plan.shapes import LayerShape

LAYERS = (
    LayerShape(name="conv1", tensors=((4, 3, 2, 2), (4,)), work=100),
    LayerShape(name="conv2", tensors=((5, 4, 1, 1), (5,), (5,)), work=200),
    LayerShape(name="fc6", tensors=((7, 6), (7,)), work=60, fully_connected=True),
    LayerShape(name="fc7", tensors=((3, 7),), work=40, fully_connected=True),
)
BATCH = 2


class ManualClock:
    """Time that passes only in sleeps, each as much longer as `late_s` says, and where `now_s`
    is moved.
    """

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s = 5.0
        self.late_s = late_s

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + self.late_s

    def pace(self) -> Pace:
        return Pace(slack_s=1e-3, now=self.now, sleep=self.sleep)


def make_net(compute_s: float = 0.0, clock: ManualClock | None = None) -> EmulatedNet:
    return EmulatedNet(
        LAYERS, batch=BATCH, compute_s=compute_s, pace=(clock or ManualClock()).pace()
    )


def test_parameters_have_the_real_shapes_in_forward_order() -> None:
    shapes = [tuple(parameter.shape) for parameter in make_net().parameters()]
    assert shapes == [shape for layer in LAYERS for shape in layer.tensors]


def test_every_parameter_gets_its_constant_gradient_top_down() -> None:
    net = make_net()
    order: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            partial(lambda name, _: order.append(name), name)
        )
    net().sum().backward()
    for parameter in net.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter, GRADIENT))
    layers = [int(name.split(".")[1]) for name in order]
    assert layers == sorted(layers, reverse=True)
    assert set(layers) == {0, 1, 2, 3}


def test_gradients_are_views_of_one_buffer() -> None:
    net = make_net()
    for _ in range(3):
        net.zero_grad()
        net().sum().backward()
    assert (
        len(
            {
                parameter.grad.data_ptr()
                for parameter in net.parameters()
                if parameter.grad is not None
            }
        )
        == 1
    )


def test_a_weight_that_wants_no_gradient_gets_none_and_needs_no_memory() -> None:
    net = make_net()
    linear = [layer for layer in net.layers if isinstance(layer, EmulatedLinear)]
    for layer in linear:
        layer.weight.requires_grad_(False)
    net().sum().backward()
    assert all(layer.weight.grad is None for layer in linear)
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)
    assert linear[0].gradients.elements < math.prod(linear[0].weight.shape) + 7


def test_a_fully_connected_layer_sees_batches_of_real_shape() -> None:
    net = make_net()
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def note(module: torch.nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(
            lambda gradient: seen.append((tuple(arguments[0].shape), tuple(gradient.shape)))
        )

    for layer in net.layers:
        if isinstance(layer, EmulatedLinear):
            layer.register_forward_hook(note)
    net().sum().backward()
    assert seen == [((BATCH, 7), (BATCH, 3)), ((BATCH, 6), (BATCH, 7))]


def test_a_pass_takes_a_third_forward_and_two_thirds_backward() -> None:
    clock = ManualClock()
    net = make_net(3.0, clock)
    output = net()
    assert clock.now_s == pytest.approx(5.0 + 1.0)
    output.sum().backward()
    assert clock.now_s == pytest.approx(5.0 + 3.0)


@pytest.mark.parametrize("late_s", [5e-4, 8e-3])
def test_late_sleeps_do_not_add_up(late_s: float) -> None:
    clock = ManualClock(late_s=late_s)
    pace = clock.pace()
    for _ in range(1000):
        pace.spend(0.01, after_wait=True)
    assert clock.now_s == pytest.approx(5.0 + 10.0 + late_s, abs=1e-3)


def test_work_that_waited_takes_its_full_time_from_then_on() -> None:
    clock = ManualClock()
    pace = clock.pace()
    pace.spend(1.0, after_wait=True)
    clock.now_s += 7.0
    pace.spend(1.0, after_wait=True)
    assert clock.now_s == pytest.approx(5.0 + 9.0)


def test_a_backward_pass_waits_for_nobody_and_makes_up_for_what_this_machine_was_late() -> None:
    clock = ManualClock()
    net = make_net(3.0, clock)
    output = net()
    clock.now_s += 0.3
    output.sum().backward()
    assert clock.now_s == pytest.approx(5.0 + 3.0)
    clock.now_s += 0.3
    net()  # its first layer may have waited for its weights
    assert clock.now_s == pytest.approx(5.0 + 4.3)


def test_small_gradients_reuse_the_large_one() -> None:
    gradients = Gradients()
    large = gradients.of((10, 10))
    assert gradients.of((3,)).data_ptr() == large.data_ptr()
    assert gradients.elements == 100
