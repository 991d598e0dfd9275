"""Delayed momentum: rank 0 adds the momentum of what all workers have changed, once a round, and
each change counts once.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from poseidon.exchange.base import Trained
from poseidon.exchange.options import ExchangeOptions
from poseidon.exchange.rounds.state import DelayedMomentum


def momentum_of(anchors: list[torch.Tensor], *, nesterov: bool = True) -> DelayedMomentum:
    options = ExchangeOptions(
        local_steps=4, staleness=1, outer_momentum=0.5, outer_nesterov=nesterov
    )
    tensors = [Trained(name=f"w{n}", tensor=anchor) for n, anchor in enumerate(anchors)]
    momentum = DelayedMomentum(tensors, options, workers=2)
    momentum.load(None)
    return momentum


@pytest.mark.parametrize("nesterov", [True, False])
def test_changes_that_come_at_once_have_the_momentum_of_the_outer_rule(nesterov: bool) -> None:
    """Each round's changes come before rank 0's next round ends, so its momentum is one round
    behind.
    """
    anchor = torch.zeros(1, dtype=torch.float32)
    momentum = momentum_of([anchor], nesterov=nesterov)
    history, expected = 0.0, 0.0
    for step in range(1, 7):
        anchor.sub_(step)  # all workers' changes
        extra = momentum.next_extra(0).clone()
        before, history = history, 0.5 * history + step
        expected -= step + 0.5 * (history if nesterov else before)
        anchor.sub_(extra)
        assert anchor.item() == pytest.approx(expected)


def test_each_change_counts_once_whatever_comes_between() -> None:
    random = np.random.default_rng(0)
    anchor = torch.zeros(3)
    momentum, total, history = momentum_of([anchor]), torch.zeros(3), torch.zeros(3)
    for kind in itertools.chain.from_iterable(
        random.permutation([0, 0, 0, 1, 2]) for _ in range(20)
    ):
        if kind == 0:
            change = torch.from_numpy(random.standard_normal(3).astype(np.float32))
            anchor.sub_(change)
            total.add_(change)
        elif kind == 1:
            momentum.settle()
        else:
            anchor.sub_(momentum.next_extra(0))
            history.mul_(0.5).add_(total)
            total.zero_()
    momentum.settle()
    (own, moved) = momentum.histories()[0]
    np.testing.assert_allclose(own, history, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(moved, total, rtol=1e-4, atol=1e-5)


def test_histories_go_on() -> None:
    anchors = [torch.zeros(2), torch.zeros(3)]
    momentum = momentum_of(anchors)
    for anchor in anchors:
        anchor.sub_(1)
    momentum.settle()
    again = momentum_of(anchors)
    again.load(momentum.histories())
    for index in range(2):
        assert torch.equal(again.next_extra(index), momentum.next_extra(index))
    of_shards = momentum_of(anchors)
    # of a job at staleness 0
    of_shards.load([[np.full(2, 4, np.float32)], [np.full(3, 4, np.float32)]])
    assert of_shards.next_extra(0).tolist() == [1.0, 1.0]
