"""Rules with torch's arguments."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from poseidon.errors import UsageError
from poseidon.torch.update_rules import (
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    AdamW,
    Lion,
    Muon,
    ParameterGroup,
    RMSProp,
    UpdateRule,
)
from ps_server import NewtonSchulz, Rule, RuleKind


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (
            SGD(lr=1, momentum=0.5, dampening=0.25),
            Rule(kind=RuleKind.TORCH_SGD, momentum=0.5, dampening=0.25),
        ),
        (
            SGD(lr=1, momentum=0.5, nesterov=True),
            Rule(kind=RuleKind.TORCH_SGD, momentum=0.5, nesterov=True),
        ),
        (AdaGrad(lr=1, eps=0.1), Rule(kind=RuleKind.ADAGRAD, delta=0.1)),
        (RMSProp(lr=1, alpha=0.5, eps=0.1), Rule(kind=RuleKind.RMSPROP, rms_decay=0.5, delta=0.1)),
        (AdaDelta(rho=0.5, eps=0.1), Rule(kind=RuleKind.ADADELTA, momentum=0.5, delta=0.1)),
        (
            Adam(betas=(0.5, 0.6), eps=0.1),
            Rule(kind=RuleKind.TORCH_ADAM, momentum=0.5, momentum2=0.6, delta=0.1),
        ),
        (
            AdamW(betas=(0.5, 0.6), eps=0.1, weight_decay=0),
            Rule(kind=RuleKind.ADAMW, momentum=0.5, momentum2=0.6, delta=0.1),
        ),
        (Lion(betas=(0.5, 0.6)), Rule(kind=RuleKind.LION, momentum=0.5, momentum2=0.6, delta=0.0)),
        (
            Muon(momentum=0.5, eps=0.1, ns_steps=3, adjust_lr_fn="match_rms_adamw", weight_decay=0),
            Rule(
                kind=RuleKind.MUON,
                momentum=0.5,
                nesterov=True,
                delta=0.1,
                matrix=NewtonSchulz(columns=4, steps=3, rate_factor=0.2 * math.sqrt(9)),
            ),
        ),
    ],
)
def test_each_is_a_rule_of_the_shards(rule: UpdateRule, expected: Rule) -> None:
    assert rule.server_rule("w", (9, 4)) == expected
    assert replace(rule, weight_decay=2).server_rule("w", (9, 4)) == replace(expected, decay=2.0)


def test_defaults_are_torchs() -> None:
    weight = [torch.nn.Parameter(torch.ones(2, 2))]
    for rule, optimizer in (
        (SGD(lr=1), torch.optim.SGD(weight)),
        (Adam(), torch.optim.Adam(weight)),
        (AdamW(), torch.optim.AdamW(weight)),
        (Muon(), torch.optim.Muon(weight)),
        (AdaGrad(lr=1), torch.optim.Adagrad(weight)),
        (RMSProp(lr=1), torch.optim.RMSprop(weight)),
        (AdaDelta(), torch.optim.Adadelta(weight)),
    ):
        known = {"groups", "others", "other_names"}
        if type(rule) in (SGD, AdaGrad, RMSProp):  # the rate is given
            known.add("lr")
        mine = {f.name: getattr(rule, f.name) for f in fields(rule) if f.name not in known}
        assert mine == {name: optimizer.defaults[name] for name in mine}


def test_muon_is_for_matrices_and_another_rule_for_the_rest() -> None:
    others = AdamW(lr=lambda step: 0.5 + step)
    rule = Muon(lr=0.25, others=others, other_names=("embed.*",))
    shapes = {"fc.weight": (3, 2), "fc.bias": (3,), "embed.weight": (5, 2)}
    kinds = {name: rule.server_rule(name, shape).kind for name, shape in shapes.items()}
    assert kinds == {
        "fc.weight": RuleKind.MUON,
        "fc.bias": RuleKind.ADAMW,
        "embed.weight": RuleKind.ADAMW,
    }
    rates = rule.rates(1)
    assert {name: rates[rule.rate_index(name, shape)] for name, shape in shapes.items()} == {
        "fc.weight": 0.25,
        "fc.bias": 1.5,
        "embed.weight": 1.5,
    }
    with pytest.raises(UsageError, match="Muon is for matrices"):
        Muon().server_rule("fc.bias", (3,))


def test_the_first_group_that_fits_counts() -> None:
    groups = (
        ParameterGroup(names="*.bias", lr_factor=2, weight_decay_factor=0),
        ParameterGroup(names="head.*", lr_factor=3),
    )
    rule = SGD(lr=1, weight_decay=0.5, groups=groups)
    found = {
        name: rule.server_rule(name, (1,)) for name in ("head.bias", "head.weight", "body.weight")
    }
    assert {name: (r.rate_factor, r.decay) for name, r in found.items()} == {
        "head.bias": (2.0, 0.0),
        "head.weight": (3.0, 0.5),
        "body.weight": (1.0, 0.5),
    }
    rule.check_groups(["head.bias"])
    with pytest.raises(
        UsageError,
        match=r"group 'head\.\*' matches no parameter of the module; there are body.bias",
    ):
        rule.check_groups(["body.bias"])


def test_numbers_reach_the_wire_as_floats() -> None:
    rule = SGD(lr=1, momentum=0, weight_decay=1, groups=(ParameterGroup(names="*", lr_factor=2),))
    found = rule.server_rule("w", (1,))
    assert {type(value) for value in (found.momentum, found.decay, found.rate_factor)} == {float}


def test_a_rate_may_follow_the_steps() -> None:
    assert SGD(lr=2).rate(7) == 2.0
    assert SGD(lr=lambda step: 1 / (1 + step)).rate(3) == 0.25
    with pytest.raises(UsageError, match=r"lr\(3\) is -3"):
        SGD(lr=lambda step: -step).rate(3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lr": -1.0}, "lr is -1.0; expected a number, 0 or more"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": 1.0, "weight_decay": "x"}, "weight_decay is 'x'"),
        ({"lr": 1.0, "momentum": 1.0}, "SGD: momentum is 1.0; expected 0 <= momentum < 1"),
        ({"lr": 1.0, "nesterov": True}, "nesterov=True with momentum 0.0 and dampening 0.0"),
    ],
)
def test_what_is_out_of_range(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SGD(**arguments)  # type: ignore[arg-type]


def test_other_adjustments_of_the_rate_are_refused() -> None:
    with pytest.raises(UsageError, match="adjust_lr_fn of Muon is 'none'; expected 'original'"):
        Muon(adjust_lr_fn="none")
    with pytest.raises(UsageError, match="Muon: ns_steps is 100; expected 0 to 99"):
        Muon(ns_steps=100)


def test_factors_of_a_group_are_not_negative() -> None:
    with pytest.raises(UsageError, match=r"lr_factor of the group '\*' is -1"):
        ParameterGroup(names="*", lr_factor=-1)
