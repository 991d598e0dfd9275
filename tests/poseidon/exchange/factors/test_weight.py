"""A weight that travels as factors: its pairs' memory, its base, and what a worker sees ahead of
the base.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from poseidon.exchange.base import Trained
from poseidon.exchange.device import DONE
from poseidon.exchange.factors.factor_rounds import Pair
from poseidon.exchange.factors.products import Kernel, Scratch
from poseidon.exchange.factors.weight import FactorWeight, WeightProgress
from poseidon.exchange.ruled import RuledTensor
from ps_server import Rule
from tests.support.factor_frames import pair_of

CPU = torch.device("cpu")


def weight_of(staleness: int) -> FactorWeight:
    trained = Trained(name="fc", tensor=nn.Parameter(torch.ones(2, 3)), rule=Rule(momentum=0.5))
    weight = FactorWeight(
        0,
        RuledTensor(trained),
        clock=0,
        staleness=staleness,
        scratch=Scratch(CPU, Kernel.PORTABLE),
    )
    weight.open()
    return weight


def copied(weight: FactorWeight, iteration: int, u_KN: Tensor, v_KM: Tensor) -> Pair:
    pair, _ = weight.copy(iteration, u_KN, v_KM, None, DONE)
    return pair


def test_the_memory_of_a_pair_is_used_again_once_every_worker_has_it() -> None:
    for staleness in (0, 2):
        weight = weight_of(staleness)
        pairs = [copied(weight, i, torch.full((4, 2), i), torch.full((4, 3), i)) for i in range(8)]
        period = 2 * staleness + 2
        same = [pairs[i].u.ctypes.data == pairs[0].u.ctypes.data for i in range(8)]
        assert same == [i % period == 0 for i in range(8)]
        assert pairs[7].u.shape == (4, 2)
        assert (pairs[7].v == 7).all()


def test_memory_grows_with_the_batch() -> None:
    weight = weight_of(0)
    assert copied(weight, 0, torch.ones(2, 2), torch.ones(2, 3)).u.shape == (2, 2)
    assert copied(weight, 2, torch.ones(5, 2), torch.ones(5, 3)).u.shape == (5, 2)
    assert copied(weight, 4, torch.empty(0, 2), torch.empty(0, 3)).v.shape == (0, 3)


def test_a_worker_sees_the_base_with_its_own_open_pairs_on_top() -> None:
    weight = weight_of(1)
    u, v = torch.ones(4, 2), torch.ones(4, 3)
    weight.apply(u, v, rate=0.5, scale=0.25)
    assert torch.equal(weight.base, torch.full((2, 3), 0.5))
    assert torch.equal(weight.tensor, torch.ones(2, 3))
    pair = copied(weight, 1, u, v)
    weight.replay([(1, 0.5, pair)], scale=0.25)
    assert torch.equal(weight.tensor, torch.full((2, 3), 0.5 - 0.5 * 0.5 - 0.5))
    assert torch.equal(weight.base, torch.full((2, 3), 0.5))
    assert torch.equal(weight.history[0], torch.full((2, 3), 0.5))
    weight.replay([], scale=0.25)
    assert torch.equal(weight.tensor, weight.base)


def test_at_staleness_0_a_round_waits_for_the_backward_pass_to_leave_the_weight() -> None:
    progress = WeightProgress(5, staleness=0)
    for iteration in (5, 6):
        progress.start(iteration, 0.1 * iteration)
        assert progress.handed_in == progress.released == progress.applied == iteration
        progress.hand_in(iteration)
        assert progress.handed_in == iteration + 1
        assert not progress.may_apply
        progress.release(iteration, None)
        assert progress.may_apply
        assert progress.begin_round() == 0.1 * iteration
        progress.end_round(None)
        assert progress.applied == iteration + 1
        assert not progress.may_apply


def test_with_staleness_rounds_follow_later() -> None:
    progress = WeightProgress(0, staleness=2)
    for iteration in range(3):
        progress.start(iteration, float(iteration))
        progress.hand_in(iteration)
        progress.release(iteration, None)
    assert progress.may_apply
    assert [progress.rate(iteration) for iteration in range(3)] == [0, 1, 2]
    assert progress.begin_round() == 0
    progress.end_round(None)
    assert progress.applied == 1
    with pytest.raises(KeyError):
        progress.rate(0)


def test_a_round_is_not_applied_before_its_time() -> None:
    progress = WeightProgress(0, staleness=0)
    progress.start(0, 1.0)
    with pytest.raises(AssertionError, match="has not left"):
        progress.begin_round()


def test_a_held_pair_is_taken_once() -> None:
    progress = WeightProgress(0, staleness=1)
    pair = pair_of(np.zeros((1, 2), np.float32), np.zeros((1, 3), np.float32))
    assert progress.take_held() is None
    progress.hold(pair)
    assert progress.held is pair
    with pytest.raises(AssertionError, match="held already"):
        progress.hold(pair)
    assert progress.take_held() is pair
    assert progress.held is progress.take_held() is None


def test_it_can_begin_at_another_clock() -> None:
    progress = WeightProgress(0, staleness=0)
    progress.start(0, 1.0)
    progress.release(0, None)
    progress.rewind(7)
    assert (progress.handed_in, progress.released, progress.applied) == (7, 7, 7)
    assert not progress.may_apply
