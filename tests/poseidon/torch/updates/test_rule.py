"""What a script may do to a module whose parameters the shards train, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from poseidon.errors import UsageError
from poseidon.torch.group import Group
from poseidon.torch.update_rules import SGD
from tests.support.module_groups import together

Body = Callable[[nn.Module, Group], None]


def build(_: int) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for place, parameter in enumerate(net.parameters()):
            parameter.copy_(torch.linspace(-1, 1 + place, parameter.numel()).view(parameter.shape))
    return net


def build_frozen(_: int) -> nn.Sequential:
    net = build(0)
    net[2].requires_grad_(False)
    return net


def step(module: nn.Module, group: Group) -> None:
    module(torch.ones(2, 3)).square().mean().backward()
    group.step()


def then(change: Callable[[nn.Sequential], object]) -> Body:
    """A step, a change by the script, and another step."""

    def body(module: nn.Module, group: Group) -> None:
        assert isinstance(module, nn.Sequential)
        step(module, group)
        group.settle()
        change(module)
        step(module, group)

    return body


def loads(net: nn.Sequential) -> None:
    net.load_state_dict(build(0).state_dict())


def replaces(net: nn.Sequential) -> None:
    net[0].weight.data = net[0].weight.data / 2  # type: ignore[union-attr, operator]


def adds(net: nn.Sequential) -> None:
    net.append(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (loads, r"'0\.weight' was changed by the script after distribute\(\)"),
        (nn.Module.double, r"'0\.weight' was changed by the script after distribute\(\)"),
        (replaces, r"'0\.weight' was changed by the script after distribute\(\)"),
        (adds, r"'3\.weight' has a gradient, but required none, or did not exist"),
        (lambda net: net[0].requires_grad_(False), r"'0\.weight' was frozen after distribute\(\)"),
    ],
)
def test_what_the_shards_would_not_hear_of_is_refused(
    change: Callable[[nn.Sequential], object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        together(1, build, SGD(lr=0.1), then(change))


def test_an_optimizer_beside_a_rule_is_refused() -> None:
    """A line that is left of a script for one process or DDP."""

    def body(module: nn.Module, group: Group) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        group.step()

    with pytest.raises(UsageError, match=r"written after 1 backward.*an optimizer's step\(\)"):
        together(1, build, SGD(lr=0.1), body)


def test_weights_in_another_order_of_memory_are_for_optimizers() -> None:
    def channels_last(_: int) -> nn.Module:
        return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    expected = (
        r"'weight' is not contiguous in memory.*make it contiguous, or use a torch.optim optimizer"
    )
    with pytest.raises(UsageError, match=expected):
        together(1, channels_last, SGD(lr=0.1), lambda *_: None)


def test_a_parameter_that_was_frozen_before_cannot_be_trained_later() -> None:
    with pytest.raises(UsageError, match=r"'2\.weight' has a gradient, but required none"):
        together(1, build_frozen, SGD(lr=0.1), then(lambda net: net[2].requires_grad_(True)))


def test_the_module_is_not_used_between_backward_and_step() -> None:
    def body(module: nn.Module, group: Group) -> None:
        module(torch.ones(2, 3)).sum().backward()
        with torch.no_grad():
            module(torch.ones(2, 3))

    with pytest.raises(UsageError, match=r"used after 1 backward pass\(es\) and before step\(\)"):
        together(1, build, SGD(lr=0.1), body)


def of_an_earlier_graph(module: nn.Module, group: Group) -> None:
    loss: Tensor = module(torch.ones(2, 3)).square().mean()
    loss.backward(retain_graph=True)
    group.step()
    loss.backward()


def with_a_read_between(module: nn.Module, group: Group) -> None:
    loss: Tensor = module(torch.ones(2, 3)).square().mean()
    loss.backward(retain_graph=True)
    group.step()
    module.get_parameter("0.bias").tolist()
    loss.backward()


@pytest.mark.parametrize("body", [of_an_earlier_graph, with_a_read_between])
def test_a_loss_from_before_the_step_is_refused(body: Body) -> None:
    words = r"computed before step \d had ended|modified by an inplace operation"
    with pytest.raises((UsageError, RuntimeError), match=words):
        together(1, build, SGD(lr=0.1), body)


def test_a_loss_may_use_parameters_without_a_forward_pass() -> None:
    def body(settles: bool) -> Body:
        def run(module: nn.Module, group: Group) -> None:
            for _ in range(4):
                weights = [p for name, p in module.named_parameters() if name.endswith("weight")]
                torch.linalg.multi_dot([*reversed(weights), torch.ones(3, 2)]).sum().backward()
                group.step()
                if settles:
                    group.settle()

        return run

    ends = [together(2, build, SGD(lr=0.1), body(settles)) for settles in (False, True)]
    for name, value in ends[0][0].items():
        assert torch.equal(value, ends[1][0][name])


@pytest.mark.parametrize("settles", [True, False])
def test_a_method_beside_forward_uses_values_that_have_come(settles: bool) -> None:
    def body(module: nn.Module, group: Group) -> None:
        for at in range(3):
            x = torch.ones(2, 3)
            if at == 1:  # as a `training_step` of the script's, which does not run the root
                assert isinstance(module, Scaled)
                module.scaled(x).sum().backward()
            else:
                module(x).sum().backward()
            group.step()
            if settles:
                group.settle()

    together(1, lambda _: Scaled(), SGD(lr=0.1), body)


class Scaled(nn.Module):
    """A parameter of the root, which a second method reads without the root's forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(1))

    def scaled(self, x: Tensor) -> Tensor:
        return Tensor(self.layer(x) * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)


def test_parameters_in_one_anothers_memory_are_refused() -> None:
    def shared(_: int) -> nn.Module:
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        net[1].weight.data = net[0].weight.data
        return net

    with pytest.raises(UsageError, match=r"'0\.weight' and '1\.weight' share memory"):
        together(1, shared, SGD(lr=0.1), step)
