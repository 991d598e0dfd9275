"""Codecs by a loss budget."""

from __future__ import annotations

import pytest
import torch

from poseidon.errors import UsageError
from poseidon.exchange.lossy.automatic import MEASURED, Auto, wire_bytes

SHAPES = [(64, 32, 5, 5), (1024, 1024), (10, 500), (8192,)]
BUDGETS = sorted(loss for _, loss in MEASURED)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_codec_is_within_the_budget_and_more_budget_buys_fewer_bytes(
    shape: tuple[int, ...], budget: float
) -> None:
    tensor = torch.empty(shape)
    assert dict(MEASURED)[Auto(budget).choose(tensor)] <= budget
    sizes = [wire_bytes(Auto(other).choose(tensor), tensor) for other in BUDGETS if other <= budget]
    assert sizes == sorted(sizes, reverse=True)


def test_what_a_budget_buys() -> None:
    weight, bias = torch.empty(1024, 1024), torch.empty(8192)
    bought = {
        budget: [str(Auto(budget).choose(t)) for t in (weight, bias)]
        for budget in (0.005, 0.01, 0.09, 0.1)
    }
    assert bought == {
        0.005: ["int8", "int8"],
        0.01: ["int4", "int4"],
        0.09: ["int4", "int4"],
        0.1: ["powersgd:4:int8", "int4"],
    }


@pytest.mark.parametrize("budget", [0.0, 0.001, -1.0, float("nan"), float("inf"), None])
def test_a_budget_that_no_codec_keeps_is_refused(budget: float | None) -> None:
    with pytest.raises(UsageError, match="budget"):
        Auto(budget)
