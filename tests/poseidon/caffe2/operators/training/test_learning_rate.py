"""Policies of the learning rate at chosen iterations."""

from __future__ import annotations

from math import cos, pi
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from tests.support.caffe2_operators import run

WARMUP = {"start_warmup_multiplier": 0.2, "constant_warmup_num_iter": 4}
WARMUP["linear_warmup_num_iter"] = 8
CASES: list[tuple[str, dict[str, Any], dict[int, float]]] = [
    ("fixed", {}, {1: 1, 100: 1}),
    ("step", {"gamma": 0.1, "stepsize": 3}, {2: 1, 3: 0.1, 6: 0.01}),
    ("exp", {"gamma": 0.5}, {1: 0.5, 3: 0.125}),
    ("inv", {"gamma": 1.0, "power": 2.0}, {1: 0.25}),
    ("poly", {"power": 2.0, "max_iter": 10}, {5: 0.25, 10: 0}),
    ("alter", {"active_period": 2, "inactive_period": 3, "active_first": 0}, {2: 0, 3: 1, 5: 0}),
    ("gate", {"multiplier_1": 2.0, "multiplier_2": 3.0, "num_iter": 4}, {3: 2, 4: 3}),
    ("linearWarmup", {"start_multiplier": 0.5, "num_iter": 4}, {0: 0.5, 2: 0.75, 4: 1}),
    ("constantWarmup", {"multiplier": 0.25, "num_iter": 4}, {3: 0.25, 4: 1}),
    ("pieceWarmup", {"m1": 0.1, "n1": 2, "m2": 0.2, "n2": 4, "m3": 0.3}, {1: 0.1, 2: 0.2, 4: 0.3}),
    (
        "hill",
        {"num_iter": 2, "gamma": 1.0, "power": 1.0, "end_multiplier": 0.2},
        {1: 0.5, 3: 0.5, 50: 0.2},
    ),
    (
        "slope",
        {"num_iter_1": 2, "multiplier_1": 1.0, "num_iter_2": 6, "multiplier_2": 0.2},
        {1: 1, 4: 0.6, 7: 0.2},
    ),
    ("cyclical", {"max_lr": 1.0, "stepsize": 4, "decay": 1.0}, {2: 1.5, 4: 2, 6: 1.5, 8: 1}),
    (
        "cyclical",
        {"max_lr": 1.0, "stepsize": 2, "decay": 0.5},
        {2: 2, 3: 1.5, 5: 1.25, 6: 1.5, 10: 1.25},
    ),
    (
        "cosine",
        {"min_lr": 0.1, "max_lr": 0.5, "period": 4, "t_mult": 2.0, "lr_shrink": 0.5},
        {0: 0.5, 2: 0.3, 4: 0.25, 8: 0.15},
    ),
    ("constantThenLinearWarmup", WARMUP, {3: 0.2, 8: 0.6, 12: 1}),
    (
        "compositeCyclical",
        {**WARMUP, "cyclical_max_lr": 1.0, "cyclical_step_size": 4},
        {8: 0.6, 14: 1.5},
    ),
    (
        "compositeCosine",
        {**WARMUP, "cosine_max_lr": 0.4, "cosine_min_lr": 0.0, "cosine_period": 8},
        {13: 0.2 * (1 + cos(pi / 8))},
    ),
    (
        "composite",
        {
            "sub_policy_num_iters": [2, 2],
            "sub_policy_0_policy": "fixed",
            "sub_policy_0_lr_scale": 3.0,
            "sub_policy_1_policy": "exp",
            "sub_policy_1_gamma": 0.5,
        },
        {1: 3, 2: 3, 3: 0.125},
    ),
]


@pytest.mark.parametrize(("policy", "arguments", "factors"), CASES)
def test_policy(policy: str, arguments: dict[str, Any], factors: dict[int, float]) -> None:
    for iteration, factor in factors.items():
        (rate,) = run(
            "LearningRate", [np.array([iteration])], base_lr=0.5, policy=policy, **arguments
        )
        np.testing.assert_allclose(rate, 0.5 * factor, rtol=1e-5, atol=1e-7)


def test_an_unknown_policy_names_all() -> None:
    with pytest.raises(RuntimeError, match="no learning rate policy is 'cubic'"):
        run("LearningRate", [np.array([1])], base_lr=0.5, policy="cubic")


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
