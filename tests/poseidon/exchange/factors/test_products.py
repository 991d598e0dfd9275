"""Gradients rebuilt from factors are the dense ones, for every rule, shape of tile and number of
rows.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from poseidon.exchange.factors import products as factors
from poseidon.exchange.factors.products import (
    Kernel,
    Scratch,
    apply_factors,
    factors_sum_of_squares,
)
from ps_server import Rule, RuleKind
from ps_server.rules import history_count, sum_of_squares, update

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [kind for kind in RuleKind if kind is not RuleKind.MUON])
@pytest.mark.parametrize(
    ("elements", "columns"), [(1, 1), (20, 2048), (6, 2), (2**20, 3), (2**20, 2048)]
)
def test_a_rule_on_factors_is_the_rule_on_their_product(
    kind: RuleKind, elements: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factors, "TILE_ELEMENTS", elements)
    monkeypatch.setattr(factors, "TILE_COLUMNS", columns)
    rule = Rule(kind=kind, momentum=0.9, decay=0.01)
    u_BN, v_BM, value = random(6, 7), random(6, 5, seed=1), random(7, 5, seed=2)
    history = [torch.zeros(7, 5) for _ in range(history_count(kind))]
    dense, dense_history, scratch = value.clone(), [h.clone() for h in history], Scratch(CPU)
    for step in range(3):
        apply_factors(
            rule, u_BN, v_BM, value, history, rate=0.1, step=step, scale=0.25, scratch=scratch
        )
        gradient = 0.25 * (u_BN.t() @ v_BM)
        update(rule, gradient, dense_history, dense, rate=0.1, step=step)
    torch.testing.assert_close(value, dense)
    torch.testing.assert_close(history, dense_history)


def test_no_rows_are_a_gradient_of_zero() -> None:
    value = random(3, 4)
    before = value.clone()
    scratch = Scratch(CPU)
    scratch.take("tile", 3, 4).fill_(float("nan"))
    apply_factors(
        Rule(),
        torch.empty(0, 3),
        torch.empty(0, 4),
        value,
        [torch.zeros(3, 4)],
        rate=0.1,
        step=0,
        scale=1.0,
        scratch=scratch,
    )
    assert torch.equal(value, before)


@pytest.mark.parametrize("kernel", Kernel)
@pytest.mark.parametrize("elements", [20, 2**20])
def test_rows_with_a_single_1_add_a_gradient_to_the_bit(
    kernel: Kernel, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factors, "TILE_ELEMENTS", elements)
    gradient = random(300, 4)
    before, value = random(2, 300, seed=1), torch.zeros(300, 4)
    apply_factors(
        Rule(kind=RuleKind.MEAN),
        torch.cat([before, torch.eye(300)]),
        torch.cat([random(2, 4, seed=2), gradient]),
        value,
        [],
        rate=0.1,
        step=0,
        scale=1.0,
        scratch=Scratch(CPU, kernel),
    )
    torch.testing.assert_close(value, before.t() @ random(2, 4, seed=2) + gradient)
    alone = torch.zeros(300, 4)
    apply_factors(
        Rule(kind=RuleKind.MEAN),
        torch.eye(300),
        gradient,
        alone,
        [],
        rate=0.1,
        step=0,
        scale=1.0,
        scratch=Scratch(CPU, kernel),
    )
    assert torch.equal(alone, gradient)


def test_the_norm_needs_no_product() -> None:
    u_BN, v_BM = random(6, 70), random(6, 50, seed=1)
    assert factors_sum_of_squares(u_BN, v_BM) == pytest.approx(
        sum_of_squares(u_BN.t() @ v_BM), rel=1e-6
    )


def test_pairs_are_stacked_in_order_and_memory_is_kept() -> None:
    scratch = Scratch(CPU)
    parts = [np.full((rows, 2), rows, np.float32) for rows in (2, 0, 1)]
    first = scratch.stack("u", parts, 2)
    assert first.tolist() == [[2, 2], [2, 2], [1, 1]]
    second = scratch.stack("u", parts[1:], 2)
    assert second.tolist() == [[1, 1]]
    assert second.data_ptr() == first.data_ptr()
