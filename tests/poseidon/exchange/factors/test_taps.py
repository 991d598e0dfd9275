"""Factors come out of autograd as they must, and the dense gradient is never formed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from poseidon.errors import UsageError
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.factors.taps import layers_with_factors
from poseidon.exchange.hooks import Hooks
from tests.support.exchanges import AloneExchange


class Recorder(AloneExchange):
    """An exchange that takes every 2-D tensor as factors, and notes the order of calls."""

    def __init__(self, tensors: list[Trained]) -> None:
        super().__init__(tensors, ExchangeSettings())
        self.by_factors = {index for index, t in enumerate(tensors) if t.tensor.dim() == 2}
        self.calls: list[tuple[str, int]] = []
        self.factors: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, index: int, gradient: Tensor) -> None:
        self.calls.append(("begin", index))

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        self.calls.append(("factors", index))
        self.factors[index] = (u_KN.clone(), v_KM.clone())

    def release(self, index: int) -> None:
        self.calls.append(("release", index))

    def finish(self) -> None:
        self.calls.append(("finish", -1))


def run(
    net: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    *,
    passes: int = 1,
    iterations: int = 1,
    wait_free: bool = True,
) -> Recorder:
    tensors = [Trained(name=name, tensor=tensor) for name, tensor in net.named_parameters()]
    exchange = Recorder(tensors)
    hooks = Hooks([net], tensors, exchange, passes=passes, wait_free=wait_free)
    try:
        for iteration in range(iterations):
            exchange.calls.clear()
            exchange.start(iteration, 0.1)
            hooks.start()
            for _ in range(passes):
                loss(net).backward()
                hooks.next_pass()
            hooks.finish()
            exchange.finish()
    finally:
        hooks.close()
    return exchange


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))


def loss_on(x: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda net: (net(x) ** 2).sum()


def dense(net: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    for tensor in net.parameters():
        tensor.grad = None
    loss(net).backward()
    gradients = [tensor.grad.clone() for tensor in net.parameters() if tensor.grad is not None]
    net.zero_grad()
    return gradients


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5)])
def test_the_product_of_the_factors_is_the_gradient(shape: tuple[int, ...]) -> None:
    net, x = mlp(), torch.randn(*shape)
    expected = dense(net, loss_on(x))
    exchange = run(net, loss_on(x))
    for index in (0, 2):
        u, v = exchange.factors[index]
        assert u.shape[0] == v.shape[0] == 6
        torch.testing.assert_close(u.t() @ v, expected[index])


def test_the_dense_gradient_is_never_formed() -> None:
    net = mlp()
    formed: list[str] = []

    def note(name: str, gradient: Tensor | None) -> None:
        if gradient is not None:
            formed.append(name)

    for name, parameter in net.named_parameters():
        parameter.register_hook(partial(note, name))
    run(net, loss_on(torch.randn(6, 5)))
    assert sorted(formed) == ["0.bias", "2.bias"]


def test_the_weight_wants_a_gradient_afterwards() -> None:
    net = mlp()
    run(net, loss_on(torch.randn(6, 5)))
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_a_weight_is_released_after_its_layer_and_before_the_pass_ends() -> None:
    calls = run(mlp(), loss_on(torch.randn(6, 5)), iterations=2).calls
    assert calls.index(("factors", 2)) < calls.index(("release", 2)) < calls.index(("factors", 0))
    # its input wants no gradient: the end of the pass releases it
    assert ("release", 0) not in calls


def test_in_the_first_iteration_no_weight_is_released_that_another_use_may_yet_read() -> None:
    calls = run(mlp(), loss_on(torch.randn(6, 5))).calls
    assert "release" not in [kind for kind, _ in calls]


def test_factors_of_several_passes_leave_together_in_the_last() -> None:
    net, x = mlp(), torch.randn(6, 5)
    expected = dense(net, loss_on(x))
    exchange = run(net, loss_on(x), passes=3)
    assert exchange.calls.count(("factors", 0)) == 1
    u, v = exchange.factors[0]
    assert u.shape[0] == 18
    torch.testing.assert_close(u.t() @ v, 3 * expected[0])


def test_without_wait_free_backpropagation_nothing_leaves_before_the_end() -> None:
    calls = run(mlp(), loss_on(torch.randn(6, 5)), wait_free=False).calls
    assert [kind for kind, _ in calls] == ["begin", "begin", "factors", "factors", "finish"]


def test_a_first_layer_without_bias_has_factors_too() -> None:
    net = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh())
    x = torch.randn(6, 5)
    expected = dense(net, loss_on(x))
    u, v = run(net, loss_on(x)).factors[0]
    torch.testing.assert_close(u.t() @ v, expected[0])


def test_evaluation_between_takes_nothing() -> None:
    def loss(net: nn.Module) -> Tensor:
        with torch.no_grad():
            net(torch.randn(2, 5))
        return (net(torch.randn(6, 5)) ** 2).sum()

    assert run(mlp(), loss).factors[0][0].shape[0] == 6


def test_the_factors_of_a_layer_that_is_used_twice_leave_together() -> None:
    net = nn.Sequential(nn.Linear(5, 5))
    x = torch.randn(2, 5)

    def loss(net: nn.Module) -> Tensor:
        return (net(net(x)) ** 2).sum()

    (expected, _) = torch.autograd.grad(loss(net), list(net.parameters()))
    u, v = run(net, loss).factors[0]
    assert u.shape[0] == 4
    torch.testing.assert_close(u.t() @ v, expected)


def test_a_layer_that_is_used_again_after_its_factors_have_left_is_refused() -> None:
    def loss(net: nn.Module) -> Tensor:
        net(torch.randn(2, 5)).sum().backward()
        return net(torch.randn(2, 5)).sum()

    with pytest.raises(UsageError, match="is used again in a pass after its factors have left"):
        run(nn.Sequential(nn.Linear(5, 5)), loss)


@pytest.mark.parametrize("first", [True, False], ids=["before its layer", "after its layer"])
def test_a_weight_that_is_used_beside_its_layer_is_refused(first: bool) -> None:
    def loss(net: nn.Module) -> Tensor:
        x = torch.randn(2, 5, requires_grad=True)
        beside = nn.functional.linear(x, net[0].weight) if first else x
        y: Tensor = net(beside)
        return (y if first else nn.functional.linear(y, net[0].weight)).square().sum()

    net = nn.Sequential(nn.Linear(5, 5))
    with pytest.raises(
        UsageError, match=r"'0\.weight' is used beside the forward pass of its own layer"
    ):
        run(net, loss)


def test_an_input_that_is_changed_afterwards_is_refused() -> None:
    def loss(net: nn.Module) -> Tensor:
        x = torch.randn(2, 5)
        y: Tensor = net(x)
        x.add_(1)
        return y.sum()

    with pytest.raises(UsageError, match="changed in place"):
        run(nn.Sequential(nn.Linear(5, 5)), loss)


def test_another_hooks_change_of_the_output_is_not_the_layers() -> None:
    net, x = mlp(), torch.randn(6, 5)
    net[0].register_forward_hook(lambda module, arguments, output: 2 * output)
    expected = dense(net, loss_on(x))
    u, v = run(net, loss_on(x)).factors[0]
    torch.testing.assert_close(u.t() @ v, expected[0])


def test_an_input_may_be_given_by_name() -> None:
    net, x = nn.Linear(5, 4, bias=False), torch.randn(6, 5)

    def loss(net: nn.Module) -> Tensor:
        return net(input=x).square().sum()  # type: ignore[no-any-return]

    expected = dense(net, loss)
    u, v = run(net, loss).factors[0]
    torch.testing.assert_close(u.t() @ v, expected[0])


def test_a_weight_that_the_user_has_frozen_stays_so() -> None:
    def loss(net: nn.Module) -> Tensor:
        net.get_parameter("2.weight").requires_grad_(False)
        return net(torch.randn(6, 5)).sum()  # type: ignore[no-any-return]

    net = mlp()
    exchange = run(net, loss)
    assert not net[2].weight.requires_grad
    assert sorted(exchange.factors) == [0]


def test_a_forward_pass_that_fails_leaves_the_weight_as_it_was() -> None:
    def loss(net: nn.Module) -> Tensor:
        with pytest.raises(RuntimeError, match="shapes"):
            net(torch.randn(6, 3))
        return (net(torch.randn(6, 5)) ** 2).sum()

    net = mlp()
    assert sorted(run(net, loss).factors) == [0, 2]
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_autograd_grad_sends_nothing() -> None:
    x = torch.randn(6, 5, requires_grad=True)

    def loss(net: nn.Module) -> Tensor:
        (toward,) = torch.autograd.grad(net(x).sum(), x)
        return (net(x.detach() + toward) ** 2).sum()

    net = mlp()
    expected = dense(net, loss)
    exchange = run(net, loss)
    assert exchange.calls.count(("factors", 0)) == 1
    u, v = exchange.factors[0]
    torch.testing.assert_close(u.t() @ v, expected[0])


def of_weights(net: nn.Module) -> Tensor:
    y: Tensor = net(torch.randn(6, 5)).sum()
    return y + torch.autograd.grad(y, list(net.parameters()), retain_graph=True)[0].sum()


def of_gradients(net: nn.Module) -> Tensor:
    x = torch.randn(6, 5, requires_grad=True)
    (toward,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    return toward.square().sum()


def with_late_hook(net: nn.Module) -> Tensor:
    net.get_parameter("0.weight").register_hook(lambda gradient: gradient)
    return net(torch.randn(6, 5)).sum()  # type: ignore[no-any-return]


def with_old_gradient(net: nn.Module) -> Tensor:
    net.get_parameter("0.weight").grad = torch.ones(4, 5)
    return net(torch.randn(6, 5)).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (of_weights, r"torch\.autograd\.grad was called"),
        (of_gradients, "no gradient of its gradient"),
        (with_late_hook, r"'0\.weight' was given a hook after distribute"),
        (
            with_old_gradient,
            r"'0\.weight' still has the gradient of an earlier step; expected zero_grad",
        ),
    ],
)
def test_what_factors_cannot_give_is_refused(
    loss: Callable[[nn.Module], Tensor], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        run(mlp(), loss)


def test_a_shared_weight_is_not_offered_and_is_refused() -> None:
    net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    net[1].weight = net[0].weight
    assert layers_with_factors(net) == {}
    with pytest.raises(UsageError, match="shared"):
        run(net, loss_on(torch.randn(2, 5)))


def test_a_weight_that_is_read_behind_its_modules_back_is_not_offered() -> None:
    attention = nn.MultiheadAttention(4, 2)
    assert attention.out_proj.weight not in layers_with_factors(attention)
