"""Policies of the learning rate at chosen iterations."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from tests.support.caffe2_operators import run


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
