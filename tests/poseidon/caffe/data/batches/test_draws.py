"""Draws are a pure function of seed and number, and look random."""

from __future__ import annotations

import numpy as np

from poseidon.caffe.data.batches.draws import draw


def test_a_draw_depends_on_nothing_but_seed_number_and_lane() -> None:
    together = draw(7, np.arange(100), 3)
    np.testing.assert_array_equal(together[40:41], draw(7, np.array([40]), 3))
    np.testing.assert_array_equal(together[:, :2], draw(7, np.arange(100), 2))
    assert not np.array_equal(together, draw(8, np.arange(100), 3))
    # Held for ever: a snapshot of today must go on with the same crops tomorrow.
    assert draw(1, np.array([0, 1, 10**12]), 2).tolist() == PINNED


def test_any_seed_will_do() -> None:
    for seed in (-1, 0, 2**63, 2**70):
        assert draw(seed, np.array([-1, 0]), 1).min() >= 0


def test_lanes_are_uniform_and_independent() -> None:
    numbers = np.arange(40_000)
    draws = np.concatenate([draw(0, numbers, 3), draw(1, numbers, 1)], axis=1)
    assert draws.min() >= 0
    assert draws.max() < 2**31
    bits = draws[:, :, None] >> np.arange(31) & 1
    assert abs(bits.mean(axis=0) - 0.5).max() < 0.012
    correlation = np.corrcoef((draws / 2**31).T)
    assert abs(correlation - np.eye(4)).max() < 0.02
    neighbours = np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]
    assert abs(neighbours) < 0.02
    counts = np.bincount(draws[:, 0] % 30, minlength=30)
    assert abs(counts / counts.mean() - 1).max() < 0.12


PINNED = [[1852969470, 2113131441], [1194085295, 1372011722], [1069928129, 513409362]]
