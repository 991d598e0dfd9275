"""Wait-free backpropagation: when gradients leave and when layers wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from poseidon.errors import UsageError
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.hooks import Hooks
from tests.support.exchanges import AloneExchange


class Recorder(AloneExchange):
    """Writes down what is called."""

    def __init__(self, tensors: list[Trained], log: list[str]) -> None:
        super().__init__(tensors, ExchangeSettings())
        self._names = [trained.name for trained in tensors]
        self.log = log

    def begin(self, index: int, gradient: Tensor) -> None:
        self.log.append(f"begin {self._names[index]}")
        super().begin(index, gradient)

    def wait(self, index: int) -> None:
        self.log.append(f"wait {self._names[index]}")


class Layer(nn.Module):
    """A matrix that writes down its forward and the end of its backward."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.name = name
        self.log = log

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(f"forward {self.name}")
        if x.requires_grad:
            x.register_hook(lambda _: self.log.append(f"backward below {self.name}"))
        return x @ self.weight


def build(passes: int = 1) -> tuple[nn.Module, Hooks, Recorder, list[str]]:
    log: list[str] = []
    net = nn.Sequential(Layer("low", log), Layer("high", log))
    tensors = [Trained(name=layer.name, tensor=layer.weight) for layer in net]  # type: ignore[arg-type, union-attr]
    exchange = Recorder(tensors, log)
    return net, Hooks([net], tensors, exchange, passes=passes), exchange, log


def run(net: nn.Module, hooks: Hooks, passes: int = 1) -> None:
    hooks.start()
    for _ in range(passes):
        net(torch.ones(1, 2, requires_grad=True)).sum().backward()
        hooks.next_pass()
    hooks.finish()


def test_each_layer_waits_right_before_it_runs_and_gradients_leave_during_backward() -> None:
    net, hooks, _, log = build()
    run(net, hooks)
    forward, backward = log[: log.index("forward high") + 1], log[log.index("forward high") + 1 :]
    # A tensor is waited for after the layers below it have begun.
    assert forward.index("wait high") > forward.index("wait low")
    assert forward.index("forward low") < forward.index("wait high")
    # The upper layer's gradient leaves before the lower layer's backward pass is over.
    assert backward.index("begin high") < backward.index("backward below low")
    assert backward.index("begin high") < backward.index("begin low")
    assert all(parameter.grad is None for parameter in net.parameters())
    hooks.close()


def test_with_iter_size_gradients_leave_once_in_the_last_pass() -> None:
    net, hooks, _, log = build(passes=3)
    run(net, hooks, passes=3)
    assert log.count("begin low") == 1
    assert (
        log.index("begin high") > [i for i, entry in enumerate(log) if entry == "forward high"][-1]
    )
    assert log.count("wait low") == 1
    hooks.close()


def test_a_layers_other_hooks_see_what_has_come() -> None:
    log: list[str] = []
    layer = Layer("low", log)
    layer.register_forward_pre_hook(lambda module, arguments: log.append("another hook"))
    tensors = [Trained(name="low", tensor=layer.weight)]
    hooks = Hooks([layer], tensors, Recorder(tensors, log))
    run(layer, hooks)
    assert log[:3] == ["wait low", "another hook", "forward low"]
    hooks.close()


def clipped(net: nn.Module) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def dropped(net: nn.Module) -> None:
    net.get_parameter("0.weight").grad = None


def replaced(net: nn.Module) -> None:
    net.get_parameter("0.weight").grad = torch.ones(2, 2)


@pytest.mark.parametrize("change", [clipped, dropped, replaced])
def test_a_gradient_that_is_changed_on_its_way_is_refused(
    change: Callable[[nn.Module], None],
) -> None:
    net, hooks, _, _ = build()
    hooks.start()
    net(torch.ones(1, 2)).sum().backward()
    change(net)
    with pytest.raises(UsageError, match=r"the gradient of '(low|high)' was changed"):
        hooks.finish()
    hooks.close()


def twice(net: nn.Module) -> None:
    for _ in range(2):
        net(torch.ones(1, 2)).sum().backward()


def in_double(net: nn.Module) -> None:
    net.double()(torch.ones(1, 2, dtype=torch.float64)).sum().backward()


@pytest.mark.parametrize(
    ("backward", "words"),
    [
        (twice, "'high' was computed twice in a pass"),
        (in_double, r"'high' is torch\.float64; expected"),
    ],
)
def test_a_gradient_that_cannot_travel_is_refused(
    backward: Callable[[nn.Module], None], words: str
) -> None:
    net, hooks, _, _ = build()
    hooks.start()
    with pytest.raises(UsageError, match=words):
        backward(net)
    hooks.close()


def test_a_sparse_gradient_is_refused() -> None:
    net = nn.Embedding(3, 2, sparse=True)
    tensors = [Trained(name="rows", tensor=net.weight)]
    hooks = Hooks([net], tensors, Recorder(tensors, []))
    hooks.start()
    with pytest.raises(UsageError, match="the gradient of 'rows' is sparse"):
        net(torch.tensor([1])).sum().backward()
    hooks.close()


def test_close_takes_the_hooks_off() -> None:
    net, hooks, _, log = build()
    hooks.close()
    net(torch.ones(1, 2)).sum().backward()
    assert not [entry for entry in log if entry.startswith(("begin", "wait"))]


class Borrower(nn.Module):
    """Reads the weight of a layer without running it, as torch.nn.MultiheadAttention does."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.low, self.lent = Layer("low", log), Layer("lent", log)
        self.borrows = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.low(x)
        result: Tensor = x @ self.lent.weight if self.borrows else self.lent(x)
        return result


def borrower() -> tuple[Borrower, Hooks, list[str]]:
    log: list[str] = []
    net = Borrower(log)
    tensors = [Trained(name=layer.name, tensor=layer.weight) for layer in (net.low, net.lent)]
    return net, Hooks([net], tensors, Recorder(tensors, log)), log


def test_a_tensor_read_behind_its_modules_back_is_waited_for_from_the_second_iteration_on() -> None:
    net, hooks, log = borrower()
    run(net, hooks)
    log.clear()
    run(net, hooks)
    assert log[:2] == ["wait lent", "wait low"]
    hooks.close()


def test_a_tensor_read_behind_its_modules_back_only_later_is_refused() -> None:
    net, hooks, _ = borrower()
    net.borrows = False
    run(net, hooks)
    net.borrows = True
    with pytest.raises(UsageError, match="'lent' was used before its new value had arrived"):
        run(net, hooks)
    hooks.close()


def test_a_layer_waits_for_its_buffers_too() -> None:
    log: list[str] = []
    net = nn.BatchNorm1d(2, affine=False)
    assert net.running_mean is not None
    mean = net.running_mean
    tensors = [Trained(name="mean", tensor=mean, statistics=True)]  # type: ignore[arg-type]
    hooks = Hooks([net], tensors, Recorder(tensors, log))
    hooks.start()
    net(torch.ones(2, 2))
    assert log == ["wait mean"]
    hooks.close()
