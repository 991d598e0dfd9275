"""The transitions of one weight on one worker."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.exchange.factors.weight_progress import RoundStep, WeightProgress
from tests.support.factor_frames import pair_of


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
        assert progress.begin_round(iteration) == RoundStep(0.1 * iteration, None)
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
    assert progress.begin_round(0).rate == 0
    progress.end_round(None)
    assert progress.applied == 1
    with pytest.raises(KeyError):
        progress.rate(0)


def test_rounds_are_applied_in_order_and_not_before_their_time() -> None:
    progress = WeightProgress(0, staleness=0)
    progress.start(0, 1.0)
    with pytest.raises(AssertionError, match="has not left"):
        progress.begin_round(0)
    progress.release(0, None)
    with pytest.raises(AssertionError, match="round 1 comes after 0 rounds"):
        progress.begin_round(1)


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
