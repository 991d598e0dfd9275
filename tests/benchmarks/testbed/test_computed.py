"""Nets that are computed: their size, and that data depends on the rank alone."""

from __future__ import annotations

import pytest
import torch

from benchmarks.testbed.computed import BYTES, COMPUTED, TOKENS


@pytest.mark.parametrize(("name", "millions"), [("gpt-2m", 1.9), ("gpt-20m", 19.2)])
def test_the_gpts_have_the_parameters_of_their_names(name: str, millions: float) -> None:
    count = sum(parameter.numel() for parameter in COMPUTED[name].build().parameters())
    assert round(count / 1e6, 1) == millions


@pytest.mark.parametrize("name", COMPUTED)
def test_a_rank_has_the_same_batches_every_time_and_other_ranks_others(name: str) -> None:
    net = COMPUTED[name]

    def first(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return next(net.batches(rank=rank, rows=2))

    one, again, other = first(0), first(0), first(1)
    for x, y in zip(one, again, strict=True):
        assert torch.equal(x, y)
    assert not torch.equal(one[0], other[0])


def test_a_sequence_of_bytes_is_followed_by_the_next() -> None:
    x, y = next(COMPUTED["gpt-2m"].batches(rank=0, rows=3 * TOKENS))
    assert x.shape == y.shape == (3, TOKENS)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert 0 <= x.min() <= x.max() < BYTES
