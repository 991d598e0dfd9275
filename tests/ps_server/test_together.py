"""Rules of several tensors together have the bits of one after the other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ps_server import Regularization, Rule, RuleKind
from ps_server.rules import (
    _update_by_torch,
    clip_factor,
    history_count,
    norm_limit,
    sum_of_squares,
    update_together,
)

SIZES = (3, 1000, 1, 4099)
RULES = [
    Rule(kind=kind, momentum=0.9, decay=decay, nesterov=nesterov, delta=1e-6)
    for kind in RuleKind
    if kind is not RuleKind.MUON
    for decay in (0.0, 0.01)
    for nesterov in ((False, True) if kind is RuleKind.TORCH_SGD else (False,))
] + [Rule(decay=0.02, regularization=Regularization.L1)]


def drawn(seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=draw) for size in SIZES]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_together_they_have_the_same_bits(rule: Rule) -> None:
    ends = []
    for together in (False, True):
        values = drawn(0)
        histories = [[torch.zeros(size) for _ in range(history_count(rule.kind))] for size in SIZES]
        for step in range(3):
            gradients = drawn(step + 1)
            if together:
                update_together(rule, gradients, histories, values, rate=0.1, step=step)
                continue
            for one in zip(gradients, histories, values, strict=True):
                _update_by_torch(rule, *one, rate=0.1, step=step)
        ends.append([*values, *(tensor for own in histories for tensor in own)])
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_the_limit_on_the_device_is_that_of_the_host(clip: float) -> None:
    gradients = drawn(5)
    expected = clip_factor(math.fsum(map(sum_of_squares, gradients)), clip)
    assert math.isclose(norm_limit(gradients, clip).item(), expected, rel_tol=1e-12)
