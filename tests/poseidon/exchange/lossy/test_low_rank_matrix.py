"""PowerSGD's arithmetic: the compiled code has the bits of torch and numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from poseidon.exchange.base import Trained
from poseidon.exchange.lossy.low_rank_matrix import (
    LowRank,
    factor_tables,
    matrices_of,
    orthonormal,
    subtracted_product,
)
from poseidon.exchange.ruled import RuledTensor
from ps_server import Rule, native
from ps_server.codecs.blocks import Int8
from tests.support import needs

SIDES = (1, 2, 3, 7, 8, 64, 65, 257, 1000)


@pytest.fixture(params=native.Level, ids=lambda level: level.name)
def library(request: pytest.FixtureRequest) -> native.Library:
    """The compiled code with at most these instructions."""
    needs.require("native")
    found = native.load(request.param)
    assert found is not None
    return found


def vectors(rank: int, side: int, case: str) -> np.ndarray:
    numbers = np.random.default_rng(side).standard_normal((rank, side)).astype(np.float32)
    if case == "dependent":
        numbers[-1] = numbers[0] * 3
    if case == "special":
        numbers[:, ::3] = 0
        numbers[0, 0], numbers[-1, -1] = np.inf, np.nan
    return numbers * np.float32(1e-30 if case == "small" else 1)


@pytest.mark.parametrize("case", ["plain", "dependent", "special", "small"])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 8])
def test_orthonormal_columns_have_the_same_bits(
    library: native.Library, monkeypatch: pytest.MonkeyPatch, rank: int, case: str
) -> None:
    for side in SIDES:
        p = vectors(rank, side, case)
        monkeypatch.setattr(native, "LIBRARY", None)
        with np.errstate(invalid="ignore"):
            expected = orthonormal(p)
        monkeypatch.setattr(native, "LIBRARY", library)
        found = orthonormal(p)
        assert found.shape == expected.shape == (side, rank)
        np.testing.assert_array_equal(found, expected)
        if case == "plain" and rank <= side:
            np.testing.assert_allclose(found.T @ found, np.eye(rank), atol=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 8])
def test_a_product_has_the_same_bits(
    library: native.Library, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    for n, m in [(1, 1), (3, 7), (64, 65), (5, 257)]:
        basis, q = torch.randn(n, rank), torch.randn(rank, m)
        first = torch.randn(n, m)
        ends = []
        for code in (None, library):
            monkeypatch.setattr(native, "LIBRARY", code)
            left, out = first.clone(), torch.full((n, m), 9.0)
            subtracted_product(basis, q, left, out)
            ends.append((left, out))
        (left, out), (compiled_left, compiled_out) = ends
        assert torch.equal(compiled_left, left)
        assert torch.equal(compiled_out, out)
        torch.testing.assert_close(out, basis @ q)
        assert torch.equal(left, first - out)


def test_neighbours_share_tables() -> None:
    sides = [(1000, 50), (3000, 60), (100, 70), (20, 80), (30, 90)]
    tensors = [
        Trained(name=f"w{number}", tensor=torch.zeros(side), rule=Rule())
        for number, side in enumerate(sides)
    ]
    coded = LowRank(2, codec=Int8())
    chosen = {0: LowRank(4), 1: LowRank(4), 2: LowRank(4), 3: coded, 4: coded}
    tables = factor_tables(tensors, chosen)
    assert [shared.indices for shared in tables] == [(0, 1), (2,), (3,), (4,)]
    assert [held.name for held in tables[0].held] == ["w0 and 1 more, P", "w0 and 1 more, Q"]
    assert [held.tensor.numel() for held in tables[0].held] == [4 * 4000, 4 * 110]
    ruled = [RuledTensor(trained) for trained in tensors]
    two = {0: ruled[0], 1: ruled[1]}
    matrices = matrices_of(tables[0], two, range(1), tables[0].held[0].tensor)
    first, second = matrices[0], matrices[1]
    assert torch.equal(
        torch.cat([first.first_q.view(-1), second.first_q.view(-1)]), tables[0].held[1].tensor
    )
    of_one = factor_tables(tensors, {1: LowRank(4)})[0]
    alone = matrices_of(of_one, {1: ruled[1]}, range(1), of_one.held[0].tensor)
    assert torch.equal(second.first_q, alone[1].first_q)
    later = factor_tables(tensors, {0: LowRank(1, start=3), 2: LowRank(1, start=3)})
    assert [held.name for held in later[0].held][2:] == ["w0, G", "w2, G"]
