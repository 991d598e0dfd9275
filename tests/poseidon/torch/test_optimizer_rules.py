"""What the shards apply in place of torch.optim optimizers, and which of these have no exact rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.errors import UsageError
from poseidon.torch.optimizer_rules import OptimizerRules
from poseidon.torch.update_rules import (
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    AdamW,
    Muon,
    RMSProp,
    UpdateRule,
)

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def of(make: Make) -> tuple[torch.optim.Optimizer, OptimizerRules]:
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = make([weight])
    return optimizer, OptimizerRules([optimizer], {weight: "w"})


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (
            lambda w: torch.optim.SGD(w, momentum=0.5, dampening=0.25, weight_decay=0.125),
            SGD(lr=1, momentum=0.5, dampening=0.25, weight_decay=0.125),
        ),
        (
            lambda w: torch.optim.SGD(w, momentum=0.5, nesterov=True),
            SGD(lr=1, momentum=0.5, nesterov=True),
        ),
        (
            lambda w: torch.optim.Adam(w, betas=(0.5, 0.75), eps=0.1, weight_decay=0.5),
            Adam(betas=(0.5, 0.75), eps=0.1, weight_decay=0.5),
        ),
        (
            lambda w: torch.optim.Adam(w, weight_decay=0.5, decoupled_weight_decay=True),
            AdamW(weight_decay=0.5),
        ),
        (lambda w: torch.optim.AdamW(w, betas=(0.5, 0.75)), AdamW(betas=(0.5, 0.75))),
        (lambda w: torch.optim.Adagrad(w, eps=0.1), AdaGrad(lr=1, eps=0.1)),
        (lambda w: torch.optim.RMSprop(w, alpha=0.5), RMSProp(lr=1, alpha=0.5)),
        (lambda w: torch.optim.Adadelta(w, rho=0.5), AdaDelta(rho=0.5)),
        (
            lambda w: torch.optim.Muon(w, momentum=0.5, ns_steps=3, adjust_lr_fn="match_rms_adamw"),
            Muon(momentum=0.5, ns_steps=3, adjust_lr_fn="match_rms_adamw"),
        ),
    ],
)
def test_an_optimizer_is_the_rule_of_its_name(make: Make, rule: UpdateRule) -> None:
    _, rules = of(make)
    assert rules.server_rule("w", (3, 2)) == rule.server_rule("w", (3, 2))


def test_each_group_has_its_constants_and_its_present_rate() -> None:
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    one = torch.optim.AdamW(
        [{"params": [first]}, {"params": [second], "lr": 0.5, "weight_decay": 0.0}], lr=0.25
    )
    other = torch.optim.SGD([third], lr=2.0)
    rules = OptimizerRules([one, other], {first: "a", second: "b", third: "c"})
    assert [rules.server_rule(name, (2,)).decay for name in "abc"] == [0.01, 0.0, 0.0]
    assert [rules.rate_index(name, (2,)) for name in "abc"] == [0, 1, 2]
    assert rules.rates(0) == (0.25, 0.5, 2.0)
    one.param_groups[1]["lr"] = torch.tensor(0.125)
    other.param_groups[0]["lr"] = 0.0
    assert rules.rates(1) == (0.25, 0.125, 0.0)
    assert rules.label == "torch.optim.AdamW and torch.optim.SGD on the shards"


class Own(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.NAdam, "no rule of torch.optim.nadam.NAdam"),
        (Own, r"no rule of tests\..*test_optimizer_rules.Own; expected one of torch.optim's SGD"),
        (lambda w: torch.optim.AdamW(w, amsgrad=True), r"torch.optim.AdamW with amsgrad=True"),
        (lambda w: torch.optim.SGD(w, maximize=True), r"torch.optim.SGD with maximize=True"),
        (lambda w: torch.optim.RMSprop(w, momentum=0.5), r"torch.optim.RMSprop with momentum=0.5"),
        (lambda w: torch.optim.RMSprop(w, centered=True), r"RMSprop with centered=True"),
        (lambda w: torch.optim.Adagrad(w, lr_decay=0.5), r"torch.optim.Adagrad with lr_decay=0.5"),
        (
            lambda w: torch.optim.SGD([{"params": w}, {"params": [torch.ones(1)], "maximize": 1}]),
            r"SGD with maximize=1; expected on=\"workers\", or the default of maximize",
        ),
    ],
)
def test_what_has_no_exact_rule_is_refused(make: Make, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        of(make)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.SGD])
def test_an_optimizer_that_has_made_steps_is_refused(make: Any) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = make([weight], **({"momentum": 0.5} if make is torch.optim.SGD else {}))
    OptimizerRules([optimizer], {weight: "w"})
    weight.grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(
        UsageError, match=r"has already made steps, whose state the shards do not have"
    ):
        OptimizerRules([optimizer], {weight: "w"})


def test_a_parameter_follows_one_rule() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD([weight]), torch.optim.AdamW([weight])]
    with pytest.raises(UsageError, match="'w' is in two parameter groups; expected each"):
        OptimizerRules(optimizers, {weight: "w"})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("lr", -1.0, "lr of parameter group 0 is -1.0; expected a number, 0 or more"),
        ("lr", float("nan"), "lr of parameter group 0 is nan"),
        ("weight_decay", 0.5, "weight_decay of parameter group 0 is 0.5, and was 0.01"),
        ("betas", [0.5, 0.999], r"betas.* was \(0.9, 0.999\).*cycle_momentum=False of a scheduler"),
    ],
)
def test_constants_that_change_later_are_refused(name: str, value: object, words: str) -> None:
    optimizer, rules = of(torch.optim.AdamW)
    optimizer.param_groups[0]["betas"] = [0.9, 0.999]  # as load_state_dict leaves it
    assert rules.rates(0) == (0.001,)
    optimizer.param_groups[0][name] = value
    with pytest.raises(UsageError, match=words):
        rules.rates(1)
