"""Policies of the learning rate at chosen iterations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from tests.support.caffe2_operators import run

WARMUP = {"start_warmup_multiplier": 0.2, "constant_warmup_num_iter": 4}
CYCLES = {"cyclical_max_lr": 1.0, "cyclical_step_size": 4, "linear_warmup_num_iter": 8}
PARTS = {"sub_policy_0_policy": "fixed", "sub_policy_0_lr_scale": 3.0}
PARTS |= {"sub_policy_1_policy": "exp", "sub_policy_1_gamma": 0.5}


@pytest.mark.parametrize(
    ("policy", "arguments", "factors"),
    [
        ("alter", {"active_period": 2, "inactive_period": 3, "active_first": 0}, {2: 0, 3: 1}),
        ("cyclical", {"max_lr": 1.0, "stepsize": 2, "decay": 0.5}, {2: 2, 5: 1.25, 6: 1.5}),
        ("cosine", {"max_lr": 0.5, "min_lr": 0.1, "period": 4, "t_mult": 2.0}, {2: 0.3, 8: 0.297}),
        ("cosine", {}, {0: 0.5, 25: 0.3, 50: 0.495}),
        ("compositeCyclical", WARMUP | CYCLES, {8: 0.6, 14: 1.5, 22: 1.5}),
        ("composite", {"sub_policy_num_iters": [2, 2], **PARTS}, {1: 3, 2: 3, 3: 0.125}),
    ],
)
def test_settings_and_defaults_that_are_not_recorded(
    policy: str, arguments: dict[str, Any], factors: dict[int, float]
) -> None:
    for iteration, factor in factors.items():
        given = [np.array([iteration])]
        (rate,) = run("LearningRate", given, base_lr=0.5, policy=policy, **arguments)
        np.testing.assert_allclose(rate, 0.5 * factor, rtol=1e-5, atol=1e-7)


def test_an_unknown_policy_names_all() -> None:
    with pytest.raises(RuntimeError, match="no learning rate policy 'cubic'"):
        run("LearningRate", [np.array([1])], base_lr=0.5, policy="cubic")


def test_a_root_ends_with_its_iterations() -> None:
    with pytest.raises(RuntimeError, match="the policy poly has no rate at 12, after max_iter 10"):
        run("LearningRate", [np.array([12])], base_lr=0.5, policy="poly", power=0.5, max_iter=10)


def test_a_counter_counts_in_place_and_starts_at_zero() -> None:
    assert run("Iter", [np.array([4])], 1, {0: 0})[0] == [5]
    assert run("Iter", [])[0] == [0]


def test_the_rate_follows_two_gradients() -> None:
    g, lr = np.array([3, 4], "float32"), np.array([0.5], "float32")
    assert run("LearningRateAdaption", [lr, g, g], lr_alpha=0.1)[0] == pytest.approx(0.45)
    assert run("LearningRateAdaption", [lr, g, g], lr_alpha=0.1, normalized_lr_adaption=0)[
        0
    ] == pytest.approx(-2)


def test_iterations_are_counted_in_the_statistics() -> None:
    workspace.FeedBlob("counted_iter", np.array([5], np.int64))
    net = core.Net("counted")
    net.CreateMutex([], ["mutex"])
    net.AtomicIter(["mutex", "counted_iter"], ["counted_iter"])
    net.AtomicIter(["mutex", "counted_iter"], ["counted_iter"])
    net.StatRegistryExport([], ["names", "counts", "times"])
    workspace.RunNetOnce(net)
    names, counts = workspace.FetchBlobs(["names", "counts"])
    assert workspace.FetchBlob("counted_iter") == 7
    assert counts[names.tolist().index(b"atomic_iter/stats/counted_iter/num_iter")] == 2
