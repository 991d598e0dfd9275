"""Factors come out of autograd as they must, and the dense gradient is never formed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from poseidon.errors import UsageError
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.factors.taps import layers_with_factors, rows_of
from poseidon.exchange.hooks import Hooks
from tests.support.exchanges import AloneExchange


class Recorder(AloneExchange):
    """An exchange that takes every 2-D tensor as factors, and notes the order of calls."""

    def __init__(self, tensors: list[Trained]) -> None:
        super().__init__(tensors, ExchangeSettings())
        taken = [index for index, trained in enumerate(tensors) if trained.tensor.dim() == 2]
        self.by_factors = frozenset(taken)
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


def test_the_dense_gradient_is_never_formed() -> None:
    net = mlp()
    formed: list[str] = []

    def note(name: str, gradients: tuple[Tensor | None, ...]) -> None:
        if gradients[0] is not None:
            formed.append(name)

    nodes = {name: get_gradient_edge(parameter).node for name, parameter in net.named_parameters()}
    for name, node in nodes.items():
        node.register_prehook(partial(note, name))
    run(net, loss_on(torch.randn(6, 5)))
    assert sorted(formed) == ["0.bias", "2.bias"]


def test_a_hook_from_before_gets_the_whole_gradient() -> None:
    net, x = mlp(), torch.randn(6, 5)
    expected, seen = dense(net, loss_on(x)), []
    net[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    run(net, loss_on(x))
    torch.testing.assert_close(seen, expected[:1])


def test_a_weight_is_released_once_no_node_is_left_that_reads_it() -> None:
    calls = run(mlp(), loss_on(torch.randn(6, 5)), iterations=2).calls
    of_weights = [call for call in calls if call[0] in ("factors", "release")]
    assert of_weights == [("factors", 2), ("release", 2), ("factors", 0), ("release", 0)]


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
    factors = ["factors", "release"]
    assert [kind for kind, _ in calls] == [*factors, "begin", *factors, "begin", "finish"]


def test_a_layer_without_bias_that_is_used_twice_sends_its_factors_together() -> None:
    net = nn.Sequential(nn.Linear(5, 5, bias=False))
    x = torch.randn(2, 5)

    def loss(net: nn.Module) -> Tensor:
        return (net(net(x)) ** 2).sum()

    (expected,) = dense(net, loss)
    u, v = run(net, loss).factors[0]
    assert u.shape[0] == 4
    torch.testing.assert_close(u.t() @ v, expected)


def test_a_second_backward_pass_after_the_factors_have_left_is_refused() -> None:
    def loss(net: nn.Module) -> Tensor:
        net(torch.randn(2, 5)).sum().backward()
        return net(torch.randn(2, 5)).sum()

    with pytest.raises(UsageError, match=r"gradient of '0\.weight' was computed twice in a pass"):
        run(nn.Sequential(nn.Linear(5, 5)), loss)


def test_an_input_that_is_changed_afterwards_is_torchs_own_error() -> None:
    def loss(net: nn.Module) -> Tensor:
        x = torch.randn(2, 5)
        y: Tensor = net(x)
        x.add_(1)
        return y.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(nn.Sequential(nn.Linear(5, 5)), loss)


def test_a_weight_that_the_user_has_frozen_stays_so() -> None:
    def loss(net: nn.Module) -> Tensor:
        net.get_parameter("2.weight").requires_grad_(False)
        return net(torch.randn(6, 5)).sum()  # type: ignore[no-any-return]

    net = mlp()
    exchange = run(net, loss)
    assert not net[2].weight.requires_grad
    assert sorted(exchange.factors) == [0]


def plain(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().sum()  # type: ignore[no-any-return]


def by_name(net: nn.Module, x: Tensor) -> Tensor:
    first, *others = net.children()
    return nn.Sequential(*others)(first(input=x)).square().sum()  # type: ignore[no-any-return]


def seen_by(net: nn.Module, x: Tensor) -> Tensor:
    """The second layer sees rows that are not stored one after another."""
    y = net.get_submodule("0")(x.expand(2, 6, 5)).transpose(0, 1)
    return net.get_submodule("2")(y).square().sum()  # type: ignore[no-any-return]


def of_one_row(net: nn.Module, x: Tensor) -> Tensor:
    return plain(net, x[0])


def expanded(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).sum()  # type: ignore[no-any-return]


def after_evaluation(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        net(x[:2])
    return plain(net, x)


def changed_output(net: nn.Module, x: Tensor) -> Tensor:
    net.get_submodule("0").register_forward_hook(lambda module, arguments, output: 2 * output)
    return plain(net, x)


def by_autograd_grad(net: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (toward,) = torch.autograd.grad(net(x).sum(), x)
    return plain(net, x.detach() + toward)


def of_values(net: nn.Module, x: Tensor) -> Tensor:
    return torch.func.functional_call(net, dict(net.named_parameters()), (x,)).square().sum()


def autocast(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y: Tensor = net(x)
    return y.float().square().sum()


def with_hook_on_input(net: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    x.register_hook(lambda gradient: 2 * gradient)
    return plain(net, x)


def penalty_on_a_part(net: nn.Module, x: Tensor) -> Tensor:
    return plain(net, x) + 1e-4 * net.get_parameter("0.weight")[1:3].square().sum()


def penalty_on_columns(net: nn.Module, x: Tensor) -> Tensor:
    return plain(net, x) + net.get_parameter("0.weight")[:, 1].square().sum()


def decay(net: nn.Module, x: Tensor) -> Tensor:
    return plain(net, x) + 1e-9 * net.get_parameter("0.weight").square().sum()


def second_use(net: nn.Module, x: Tensor) -> Tensor:
    return plain(net, nn.functional.linear(x, net.get_parameter("0.weight"))[:, :1] + x)


def tied(net: nn.Module, x: Tensor) -> Tensor:
    return plain(net, x + net.get_parameter("0.weight")[0])


def penalty_alone(net: nn.Module, x: Tensor) -> Tensor:
    return net.get_parameter("0.weight").square().sum()


def of_gradients(net: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (toward,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    return toward.square().sum() + plain(net, x)


def of_gradients_of_weights(net: nn.Module, x: Tensor) -> Tensor:
    y = plain(net, x)
    found = torch.autograd.grad(y, list(net.parameters()), create_graph=True)
    return y + sum(gradient.square().sum() for gradient in found)


def rewritten(net: nn.Module, x: Tensor) -> Tensor:
    net.get_parameter("0.weight").register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return plain(net, x)


def rewritten_in_place(net: nn.Module, x: Tensor) -> Tensor:
    def clamp(gradient: Tensor) -> None:
        gradient.data.clamp_(-0.1, 0.1)

    loss = plain(net, x)
    net.get_parameter("0.weight").register_hook(clamp)
    return loss


def rewritten_after(net: nn.Module, x: Tensor) -> Tensor:
    def mask(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.data[1:] *= 0.5

    net.get_parameter("0.weight").register_post_accumulate_grad_hook(mask)
    return plain(net, x)


def replaced_output(net: nn.Module, x: Tensor) -> Tensor:
    net.get_submodule("0").register_forward_hook(
        lambda module, arguments, output: 2 * output, prepend=True
    )
    return plain(net, x)


def replaced_forward(net: nn.Module, x: Tensor) -> Tensor:
    first = net.get_submodule("0")
    inner = first.forward
    first.forward = lambda x: inner(x) + inner(2 * x)  # type: ignore[method-assign]
    return plain(net, x)


def reparametrized(net: nn.Module, x: Tensor) -> Tensor:
    values = {name: 2 * value for name, value in net.named_parameters()}
    return torch.func.functional_call(net, values, (x,)).square().sum()


def old_gradient(net: nn.Module, x: Tensor) -> Tensor:
    net.get_parameter("0.weight").grad = torch.full((4, 5), 0.3)
    return plain(net, x)


FACTORS_ALONE = [
    plain,
    by_name,
    seen_by,
    of_one_row,
    expanded,
    after_evaluation,
    changed_output,
    by_autograd_grad,
    of_values,
    with_hook_on_input,
    of_gradients_of_weights,
]
WITH_MORE = [
    penalty_on_a_part,
    penalty_on_columns,
    decay,
    second_use,
    tied,
    penalty_alone,
    of_gradients,
    rewritten,
    rewritten_in_place,
    rewritten_after,
    replaced_output,
    replaced_forward,
    reparametrized,
    old_gradient,
]
X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("loss", [*FACTORS_ALONE, *WITH_MORE])
def test_whatever_is_computed_from_a_weight_is_in_its_factors(
    loss: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    expected = mlp()
    loss(expected, X).backward()
    exchange = run(mlp(), lambda net: loss(net, X))
    for index, parameter in enumerate(expected.parameters()):
        if parameter.dim() == 2:
            u, v = exchange.factors.get(index, (torch.zeros(1, 1), torch.zeros(1, 1)))
            gradient = torch.zeros(1) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(
                u.t() @ v, gradient.expand_as(u.t() @ v), rtol=1e-5, atol=1e-7
            )
    assert (len(exchange.factors[0][0]) in (1, 6, 12)) is (loss in FACTORS_ALONE)


def traced(net: nn.Module) -> object:
    return torch.jit.trace(net, X)(X)


def scripted(net: nn.Module) -> object:
    return torch.jit.script(net)(X)


def by_forward_mode(net: nn.Module) -> object:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net(forward_ad.make_dual(X, torch.ones_like(X)))).tangent


def transformed(net: nn.Module) -> object:
    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(net, values, (x,)).square().sum()

    values = {name: value.detach() for name, value in net.named_parameters()}
    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, X.reshape(3, 2, 5))


def jacobian(net: nn.Module) -> object:
    return torch.autograd.functional.jacobian(net, X, vectorize=True)


def hessian(net: nn.Module) -> object:
    return torch.autograd.functional.hessian(lambda x: plain(net, x), X)


def gradients_of_weights(net: nn.Module) -> object:
    return torch.autograd.grad(plain(net, X), list(net.parameters()))


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "use", [traced, scripted, by_forward_mode, transformed, jacobian, hessian, gradients_of_weights]
)
def test_other_uses_of_a_module_with_taps_are_as_without(
    use: Callable[[nn.Module], object],
) -> None:
    found: list[object] = []

    def loss(net: nn.Module) -> Tensor:
        found.append(use(net))
        return plain(net, X)

    exchange = run(mlp(), loss)
    assert len(exchange.factors[0][0]) == len(X)
    torch.testing.assert_close(found[0], use(mlp()))


def test_factors_of_16_bits_have_more_digits_than_a_gradient() -> None:
    expected = mlp()
    autocast(expected, X).backward()
    u, v = run(mlp(), lambda net: autocast(net, X)).factors[0]
    torch.testing.assert_close(u.t() @ v, expected[0].weight.grad, rtol=1e-2, atol=1e-4)


def test_a_gradient_of_zeros_has_no_rows() -> None:
    def loss(net: nn.Module) -> Tensor:
        net.get_parameter("0.weight").grad = torch.zeros(4, 5)
        return plain(net, X)

    assert len(run(mlp(), loss).factors[0][0]) == len(X)


def test_a_part_that_begins_later_leaves_with_the_factors() -> None:
    step = iter(range(3))

    def loss(net: nn.Module) -> Tensor:
        return plain(net, X) if next(step) < 2 else penalty_on_a_part(net, X)

    exchange = run(mlp(), loss, iterations=3)
    assert [len(exchange.factors[index][0]) for index in (0, 2)] == [6 + 2, 6]


@pytest.mark.parametrize(
    ("part", "rows"),
    [
        ((slice(None), slice(None)), 3),
        ((slice(1, 2), slice(None)), 1),
        ((slice(None), slice(4, 5)), 1),
        ((slice(0, 0), slice(None)), 0),
    ],
)
@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_rows_of_a_gradient_are_its_bits(
    shape: tuple[int, int], part: tuple[slice, slice], rows: int
) -> None:
    gradient = torch.zeros(5, 5)
    gradient[part] = torch.randn(5, 5)[part]
    gradient = gradient[: shape[0], : shape[1]]
    factors = rows_of(gradient)
    found = sum((u.t() @ v for u, v in factors), torch.zeros(shape))
    assert torch.equal(found, gradient)
    assert sum(len(u) for u, _ in factors) <= min(rows, *shape)


def test_a_shared_weight_is_not_offered_and_is_refused() -> None:
    net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    net[1].weight = net[0].weight
    assert layers_with_factors(net) == {}
    with pytest.raises(UsageError, match="shared"):
        run(net, loss_on(torch.randn(2, 5)))


def test_a_weight_that_is_read_behind_its_modules_back_is_not_offered() -> None:
    attention = nn.MultiheadAttention(4, 2)
    assert attention.out_proj.weight not in layers_with_factors(attention)
