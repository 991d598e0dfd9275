"""Rules of row tables against torch.optim and by hand, and first values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ps_server.protocol.row_settings import RowInit, RowRule, RowRuleKind
from ps_server.row_rules import first_values, sum_by_row, update_rows

ROWS, DIM, STEPS = 9, 5, 60
OPTIMIZERS = {
    RowRuleKind.SGD: lambda p: torch.optim.SGD(p, lr=0.05),
    RowRuleKind.ADAM: lambda p: torch.optim.SparseAdam(p, lr=0.05, betas=(0.8, 0.95), eps=1e-7),
    RowRuleKind.ADAGRAD: lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-7),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_rule_is_torchs_on_sparse_gradients(kind: RowRuleKind) -> None:
    rule = RowRule(kind=kind, beta1=0.8, beta2=0.95, eps=1e-7)
    random = np.random.default_rng(3)
    value = random.standard_normal((ROWS, DIM)).astype(np.float32)
    history = [np.zeros((ROWS, width), np.float32) for width in rule.history_widths(DIM)]
    parameter = torch.nn.Parameter(torch.from_numpy(value.copy()))
    optimizer = OPTIMIZERS[kind]([parameter])
    for step in range(STEPS):
        rows = np.flatnonzero(random.random(ROWS) < 0.4)
        gradient = random.standard_normal((len(rows), DIM)).astype(np.float32)
        parameter.grad = torch.sparse_coo_tensor(
            torch.from_numpy(rows)[None],
            torch.from_numpy(gradient.copy()),
            (ROWS, DIM),
            check_invariants=True,
        )
        with torch.sparse.check_sparse_tensor_invariants():
            optimizer.step()
        parts, own = [h[rows] for h in history], value[rows]
        update_rows(rule, gradient, parts, own, rate=0.05, step=step)
        value[rows] = own
        for whole, part in zip(history, parts, strict=True):
            whole[rows] = part
    np.testing.assert_allclose(value, parameter.detach().numpy(), rtol=0, atol=1e-6)


def test_row_wise_adagrad_by_hand() -> None:
    gradient = np.array([[3, 4], [0, 0]], np.float32)
    history, value = [np.array([[3.5], [0]], np.float32)], np.ones((2, 2), np.float32)
    rule = RowRule(kind=RowRuleKind.ROW_WISE_ADAGRAD, eps=1.0)
    update_rows(rule, gradient, history, value, rate=0.5, step=7)
    assert history[0].tolist() == [[16.0], [0.0]]  # 3.5 + (9 + 16) / 2
    np.testing.assert_allclose(value, [[1 - 0.5 * 3 / 5, 1 - 0.5 * 4 / 5], [1, 1]], rtol=1e-6)


@pytest.mark.parametrize("kind", RowRuleKind)
def test_rows_do_not_depend_on_their_neighbours(kind: RowRuleKind) -> None:
    rule = RowRule(kind=kind)
    random = np.random.default_rng(0)
    gradient = random.standard_normal((33, 17)).astype(np.float32)
    value = random.standard_normal((33, 17)).astype(np.float32)
    history = [random.random((33, width)).astype(np.float32) for width in rule.history_widths(17)]
    alone = []
    for row in range(33):
        own = value[row : row + 1].copy()
        parts = [h[row : row + 1].copy() for h in history]
        update_rows(rule, gradient[row : row + 1].copy(), parts, own, rate=0.1, step=2)
        alone.append(own.tobytes())
    update_rows(rule, gradient, history, value, rate=0.1, step=2)
    assert b"".join(alone) == value.tobytes()


@pytest.mark.parametrize(
    ("init", "mean_square"), [(RowInit.ZEROS, 0.0), (RowInit.UNIFORM, 4 / 3), (RowInit.NORMAL, 4.0)]
)
def test_first_values_have_their_distribution(init: RowInit, mean_square: float) -> None:
    values = first_values(init, 2.0, 5, np.arange(4000, dtype=np.uint32), 16)
    assert values.dtype == np.float32
    assert abs(values.mean()) < 0.03
    assert np.mean(values.astype(np.float64) ** 2) == pytest.approx(mean_square, rel=0.02, abs=0)
    if init is RowInit.UNIFORM:
        assert np.abs(values).max() <= 2


@pytest.mark.parametrize("init", [RowInit.UNIFORM, RowInit.NORMAL])
def test_first_values_follow_from_seed_and_row(init: RowInit) -> None:
    rows = np.array([3, 2**32 - 2, 17], np.uint32)
    together = first_values(init, 1.0, 8, rows, 6)
    apart = [first_values(init, 1.0, 8, rows[i : i + 1], 6) for i in range(3)]
    assert together.tobytes() == np.concatenate(apart).tobytes()
    assert len(np.unique(together)) > 12
    assert not np.array_equal(together, first_values(init, 1.0, 9, rows, 6))
    # A checkpoint leaves out rows that no gradient has changed: these bits are for ever.
    bits = {RowInit.UNIFORM: "d066753e9c81b3be9890543f", RowInit.NORMAL: "00a0693f0090983e00b86a3f"}
    assert first_values(init, 1.0, 8, rows[:1], 3).tobytes().hex() == bits[init]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], {}),
        ([[], []], {}),
        ([[2, 5]], {2: 1, 5: 1}),
        ([[2, 5], [], [0, 5, 9]], {0: 100, 2: 1, 5: 101, 9: 100}),
        ([[5], [2]], {2: 10, 5: 1}),
    ],
)
def test_gradients_are_added_by_row(parts: list[list[int]], expected: dict[int, float]) -> None:
    given = [
        (np.array(rows, np.uint32), np.full((len(rows), 2), 10.0**number, np.float32))
        for number, rows in enumerate(parts)
    ]
    rows, total = sum_by_row(given, 2)
    assert dict(zip(rows.tolist(), total[:, 0].tolist(), strict=True)) == expected
    assert rows.dtype == np.uint32
    assert list(rows) == sorted(rows)
    assert not any(np.shares_memory(total, gradient) for _, gradient in given)
