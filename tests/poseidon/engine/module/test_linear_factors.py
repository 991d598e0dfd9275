"""Which gradients are the product of a layer's factors, and gradients of several passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from poseidon.engine.module.linear_factors import LinearFactors, watch_layers
from poseidon.errors import UsageError

ROWS, INPUTS, OUTPUTS = 5, 7, 4


class Layer(nn.Module):
    """A layer with an activation that overwrites its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(INPUTS, INPUTS)
        self.layer = nn.Linear(INPUTS, OUTPUTS)
        self.factors: LinearFactors = watch_layers(self)[self.layer.weight]

    @property
    def gradient(self) -> Tensor:
        assert self.layer.weight.grad is not None
        return self.layer.weight.grad


def once(net: Layer, x: Tensor) -> Tensor:
    return nn.functional.relu_(net.layer(net.first(x)))


def twice(net: Layer, x: Tensor) -> Tensor:
    return once(net, x) + net.layer(2 * x)


def in_a_checkpoint(net: Layer, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(once, net, x, use_reentrant=False)
    return result


def in_bfloat16(net: Layer, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return once(net, x)


def beside(net: Layer, x: Tensor) -> Tensor:
    return once(net, x) + nn.functional.linear(x, net.layer.weight)


def after_a_transform(net: Layer, x: Tensor) -> Tensor:
    def loss(weights: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(net.layer, weights, (x,))
        return result.sum()

    torch.func.grad(loss)(dict(net.layer.named_parameters()))
    return once(net, x)


def never(net: Layer, x: Tensor) -> Tensor:
    return nn.functional.linear(x, net.layer.weight)


@pytest.mark.parametrize(
    ("forward", "rows"),
    [
        (once, ROWS),
        (twice, 2 * ROWS),
        (in_a_checkpoint, ROWS),
        (after_a_transform, ROWS),
        (in_bfloat16, None),
        (beside, None),
        (never, None),
    ],
)
def test_the_product_is_compared_with_the_gradient(
    forward: Callable[[Layer, Tensor], Tensor], rows: int | None
) -> None:
    net = Layer()
    forward(net, torch.randn(ROWS, INPUTS)).pow(2).sum().backward()
    assert net.factors.are_of(net.gradient) is (rows is not None)
    if rows is not None:
        assert net.factors.rows == rows
        u, v = net.factors.factors()
        assert (u.shape, v.shape, u.dtype) == ((rows, OUTPUTS), (rows, INPUTS), torch.float32)


def test_passes_add_up_until_the_gradient_is_cleared() -> None:
    net = Layer()
    for passes in (1, 2):
        once(net, torch.randn(ROWS, INPUTS)).sum().backward()
        assert net.factors.rows == passes * ROWS
        assert net.factors.are_of(net.gradient)
    for to_none in (True, False):
        net.zero_grad(set_to_none=to_none)
        once(net, torch.randn(ROWS, INPUTS)).sum().backward()
        assert net.factors.rows == ROWS
        assert net.factors.are_of(net.gradient)


def test_a_gradient_that_has_left_and_stays_is_kept_apart() -> None:
    net = Layer()
    once(net, torch.randn(ROWS, INPUTS)).sum().backward()
    net.factors.clear()
    left = net.gradient.clone()
    once(net, torch.randn(ROWS, INPUTS)).sum().backward()
    assert net.factors.rows == ROWS
    assert net.factors.before is not None
    assert torch.equal(net.factors.before, left)
    assert net.factors.are_of(net.gradient)


def test_another_use_in_a_later_pass_is_an_error() -> None:
    net = Layer()
    once(net, torch.randn(ROWS, INPUTS)).sum().backward()
    net.factors.check(net.gradient, "w")
    net.zero_grad()
    beside(net, torch.randn(ROWS, INPUTS)).sum().backward()
    with pytest.raises(UsageError, match="'w' travels as factors, and its gradient has other"):
        for _ in range(OUTPUTS):
            net.factors.check(net.gradient, "w")


def test_no_pass_has_no_rows() -> None:
    net = Layer()
    u, v = net.factors.factors()
    assert (u.shape, v.shape) == ((0, OUTPUTS), (0, INPUTS))
    net.factors.check(torch.zeros(OUTPUTS, INPUTS), "w")


def test_without_gradients_nothing_is_kept() -> None:
    net = Layer()
    with torch.no_grad():
        once(net, torch.randn(ROWS, INPUTS))
    net.factors.close()
    once(net, torch.randn(ROWS, INPUTS)).sum().backward()
    assert net.factors.rows == 0
