"""Rules with torch's arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from poseidon.engine.module.update_rules import (
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    Nesterov,
    ParameterGroup,
    RMSProp,
    UpdateRule,
)
from poseidon.errors import UsageError
from ps_server import Rule, RuleKind


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (SGD(lr=1, momentum=0.5), Rule(kind=RuleKind.SGD, momentum=0.5)),
        (Nesterov(lr=1), Rule(kind=RuleKind.NESTEROV, momentum=0.9)),
        (AdaGrad(lr=1, eps=0.1), Rule(kind=RuleKind.ADAGRAD, delta=0.1)),
        (RMSProp(lr=1, alpha=0.5, eps=0.1), Rule(kind=RuleKind.RMSPROP, rms_decay=0.5, delta=0.1)),
        (AdaDelta(rho=0.5, eps=0.1), Rule(kind=RuleKind.ADADELTA, momentum=0.5, delta=0.1)),
        (
            Adam(betas=(0.5, 0.6), eps=0.1),
            Rule(kind=RuleKind.ADAM, momentum=0.5, momentum2=0.6, delta=0.1),
        ),
    ],
)
def test_each_is_a_rule_of_the_shards(rule: UpdateRule, expected: Rule) -> None:
    assert rule.server_rule("w") == expected
    assert replace(rule, weight_decay=2).server_rule("w") == replace(expected, decay=2.0)


def test_the_first_group_that_fits_counts() -> None:
    groups = (
        ParameterGroup(names="*.bias", lr_factor=2, weight_decay_factor=0),
        ParameterGroup(names="head.*", lr_factor=3),
    )
    rule = SGD(lr=1, weight_decay=0.5, groups=groups)
    found = {name: rule.server_rule(name) for name in ("head.bias", "head.weight", "body.weight")}
    assert {name: (r.rate_factor, r.decay) for name, r in found.items()} == {
        "head.bias": (2.0, 0.0),
        "head.weight": (3.0, 0.5),
        "body.weight": (1.0, 0.5),
    }
    rule.check_groups(["head.bias"])
    with pytest.raises(UsageError, match=r"fits the group 'head\.\*'; there are body.bias"):
        rule.check_groups(["body.bias"])


def test_numbers_reach_the_wire_as_floats() -> None:
    rule = SGD(lr=1, momentum=0, weight_decay=1, groups=(ParameterGroup(names="*", lr_factor=2),))
    found = rule.server_rule("w")
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
    ],
)
def test_what_is_out_of_range(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SGD(**arguments)  # type: ignore[arg-type]


def test_factors_of_a_group_are_not_negative() -> None:
    with pytest.raises(UsageError, match=r"lr_factor of the group '\*' is -1"):
        ParameterGroup(names="*", lr_factor=-1)
