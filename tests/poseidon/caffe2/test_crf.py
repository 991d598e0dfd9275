"""Conditional random fields against the sum over all paths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from poseidon.caffe2 import core, crf, gradient_checker, workspace
from poseidon.caffe2.model_helper import ModelHelper
from tests.support.caffe2_operators import Array, numbers

STEPS, LABELS = 4, 3
SCORES, TRANSITIONS = numbers(STEPS, LABELS), numbers(LABELS + 2, LABELS + 2)
TRUTH = np.array([2, 0, 0, 1])


def score(scores: Array, transitions: Array, path: tuple[int, ...]) -> float:
    whole = (LABELS, *path, LABELS + 1)
    steps = sum(scores[step, label] for step, label in enumerate(path))
    return float(steps + sum(transitions[a, b] for a, b in itertools.pairwise(whole)))


def all_paths(scores: Array, transitions: Array) -> dict[tuple[int, ...], float]:
    paths = itertools.product(range(LABELS), repeat=STEPS)
    return {path: score(scores, transitions, path) for path in paths}


def loss_of(scores: Array, transitions: Array) -> float:
    total = np.logaddexp.reduce(list(all_paths(scores, transitions).values()))
    return float(total - score(scores, transitions, tuple(TRUTH)))


@pytest.fixture
def model() -> ModelHelper:
    workspace.FeedBlob("scores", SCORES)
    workspace.FeedBlob("truth", TRUTH)
    workspace.FeedBlob("transitions", TRANSITIONS)
    made = ModelHelper(name="crf")
    made.net.AddExternalInputs("scores", "truth", "transitions")
    return made


def test_the_loss_and_its_gradients(model: ModelHelper) -> None:
    layer = crf.CRFWithLoss(model, LABELS, core.BlobReference("transitions"))
    loss = layer.crf_loss(core.BlobReference("scores"), core.BlobReference("truth"))
    gradients = model.net.AddGradientOperators([loss])
    workspace.RunNetOnce(model.param_init_net)
    workspace.RunNetOnce(model.net)
    np.testing.assert_allclose(workspace.FetchBlob(loss), [loss_of(SCORES, TRANSITIONS)], rtol=1e-4)
    for name, value in (("scores", SCORES), ("transitions", TRANSITIONS)):
        found = workspace.FetchBlob(gradients[name])
        for place in np.ndindex(value.shape):
            losses = []
            for step in (0.01, -0.01):
                moved = value.astype("f8")
                moved[place] += step
                pair = (moved, TRANSITIONS) if name == "scores" else (SCORES, moved)
                losses.append(loss_of(*pair))
            assert found[place] == pytest.approx((losses[0] - losses[1]) / 0.02, abs=2e-3)


def test_the_network_of_all_paths_has_gradients(model: ModelHelper) -> None:
    wide = numbers(STEPS, 1, LABELS + 2)
    workspace.FeedBlob("scores", wide)
    workspace.FeedBlob("first", numbers(1, LABELS + 2))
    layer = crf.CRFWithLoss(model, LABELS, core.BlobReference("transitions"))
    layer.build_crf_net(*(core.BlobReference(name) for name in ("scores", "first", "transitions")))
    workspace.RunNetOnce(model.param_init_net)
    op = model.net.Proto().op[-1]
    inputs = [workspace.FetchBlob(name) for name in op.input]
    checker = gradient_checker.GradientChecker(0.001, 0.05)
    for place, name in enumerate(op.input):
        if name != "crf_net/zero_segment_id":
            assert checker.CheckSimple(op, inputs, place, [1])[0], name


def test_the_most_probable_labels_have_the_largest_scores(model: ModelHelper) -> None:
    layer = crf.CRFWithLoss(model, LABELS, core.BlobReference("transitions"))
    updated = layer.update_predictions(core.BlobReference("scores"))
    workspace.RunNetOnce(model.net)
    paths = all_paths(SCORES, TRANSITIONS)
    best = max(paths, key=lambda path: paths[path])
    found = workspace.FetchBlob(updated)
    np.testing.assert_array_equal(found.argmax(1), best)
    np.testing.assert_array_equal(np.sort(found, 1), np.sort(SCORES, 1))


def test_transitions_are_made_where_none_are_given(model: ModelHelper) -> None:
    layer = crf.CRFWithLoss(model, LABELS)
    workspace.RunNetOnce(model.param_init_net)
    assert workspace.FetchBlob(layer.transitions).shape == (LABELS + 2, LABELS + 2)
