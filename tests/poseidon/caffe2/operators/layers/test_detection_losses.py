"""Detectron's losses against loops over their values, gradients by finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from tests.support.caffe2_operators import Array, assert_gradients, assert_run, numbers, run

X = numbers(2, 6, 3, 2)
"""Two images, two anchors, three classes."""


def smooth(d: float, beta: float) -> float:
    return 0.5 * d * d / beta if abs(d) < beta else abs(d) - 0.5 * beta


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


@pytest.mark.parametrize("shape", [(3, 8), (3, 4, 2, 1)])
def test_smooth_l1(shape: tuple[int, ...]) -> None:
    y, target = numbers(*shape), numbers(3, 8, seed=1)
    inside, outside = numbers(*shape, seed=2) > 0, np.abs(numbers(*shape, seed=3))
    inputs = [y, target, inside.astype("float32"), outside]
    (loss,) = run("SmoothL1Loss", inputs, beta=0.4, scale=3.0)
    every = zip(*(value.reshape(-1) for value in inputs), strict=True)
    wanted = sum(out * smooth(i * (a - b), 0.4) for a, b, i, out in every)
    np.testing.assert_allclose(loss, 3 / 3 * wanted, rtol=1e-5)
    assert loss.shape == ()
    assert_gradients("SmoothL1Loss", inputs, [0], beta=0.4, scale=3.0)


def test_smooth_l1_by_hand() -> None:
    one = np.ones((2, 1), "float32")
    y = np.array([[0.5], [3.0]], "float32")
    (loss,) = run("SmoothL1Loss", [y, 0 * y, one, one])
    assert loss == (0.125 + 2.5) / 2
    (nothing,) = run("SmoothL1Loss", [np.zeros((0, 4), "float32")] * 4)
    assert nothing == 0


@pytest.mark.parametrize("count", [0.0, 5.0])
def test_smooth_l1_of_selected_boxes(count: float) -> None:
    y, target = numbers(2, 8, 3, 2), numbers(3, 4, seed=1)
    locations = np.array([[0, 0, 2, 1], [1, 4, 0, 0], [1, 0, 1, 1]], "float32")
    inputs = [y, target, locations, np.array(count, "float32")]
    (loss,) = run("SelectSmoothL1Loss", inputs, beta=0.5, scale=2.0)
    wanted = sum(
        smooth(float(y[n, c + j, h, w] - target[m, j]), 0.5)
        for m, (n, c, h, w) in enumerate(locations.astype(int))
        for j in range(4)
    )
    np.testing.assert_allclose(loss, 2 * wanted / max(count, 1), rtol=1e-5)
    assert_gradients("SelectSmoothL1Loss", inputs, [0], beta=0.5, scale=2.0)
    empty = np.zeros((0, 4), "float32")
    assert run("SelectSmoothL1Loss", [y, empty, empty, inputs[3]])[0] == 0


@pytest.mark.parametrize("normalize", [0, 1])
def test_cross_entropy_of_sigmoids(normalize: int) -> None:
    x, target = numbers(2, 3, 2), np.array([1, 0, -1, 1, 1, 0, 0, -1, 1, 0, 0, 1], "int32")
    (loss,) = run("SigmoidCrossEntropyLoss", [x, target], scale=0.5, normalize=normalize)
    wanted = sum(
        -np.log(sigmoid(a) if t else 1 - sigmoid(a))
        for a, t in zip(x.reshape(-1), target, strict=True)
        if t >= 0
    )
    np.testing.assert_allclose(loss, 0.5 * wanted / (10 if normalize else 1), rtol=1e-5)
    inputs = [x, target.reshape(x.shape)]
    assert_gradients("SigmoidCrossEntropyLoss", inputs, [0], scale=0.5, normalize=normalize)
    ignored = np.full(x.shape, -1, "int32")
    assert run("SigmoidCrossEntropyLoss", [x, ignored])[0] == 0


def labels(most: int) -> Array:
    found = np.random.RandomState(3).randint(-1, most + 1, (2, 2, 3, 2)).astype("int32")
    assert {-1, 0, most} <= set(found.reshape(-1))
    return found


@pytest.mark.parametrize(("gamma", "count"), [(2.0, 7.0), (0.0, 0.0)])
def test_focal_loss_of_sigmoids(gamma: float, count: float) -> None:
    label = labels(3)
    inputs = [X, label, np.array([count], "float32")]
    arguments = {"gamma": gamma, "alpha": 0.3, "scale": 2.0, "num_classes": 3}
    (loss,) = run("SigmoidFocalLoss", inputs, **arguments)
    wanted = 0.0
    for n, c, h, w in np.ndindex(*X.shape):
        t, p = label[n, c // 3, h, w], sigmoid(X[n, c, h, w])
        if t == c % 3 + 1:
            wanted -= 0.3 * (1 - p) ** gamma * np.log(p)
        elif t != -1:
            wanted -= 0.7 * p**gamma * np.log(1 - p)
    np.testing.assert_allclose(loss, 2 * wanted / max(count, 1), rtol=1e-5)
    assert_gradients("SigmoidFocalLoss", inputs, [0], **arguments)


@pytest.mark.parametrize(("gamma", "count"), [(2.0, 7.0), (0.0, 0.0)])
def test_focal_loss_of_softmaxes(gamma: float, count: float) -> None:
    label = labels(2)
    inputs = [X, label, np.array(count, "float32")]
    arguments = {"gamma": gamma, "alpha": 0.3, "scale": 2.0, "num_classes": 3}
    loss, probabilities = run("SoftmaxFocalLoss", inputs, 2, **arguments)
    groups = np.exp(X.reshape(2, 2, 3, 3, 2))
    groups /= groups.sum(2, keepdims=True)
    np.testing.assert_allclose(probabilities, groups.reshape(X.shape), rtol=1e-5)
    wanted = 0.0
    for n, a, h, w in np.ndindex(*label.shape):
        t = label[n, a, h, w]
        if t >= 0:
            p = groups[n, a, t, h, w]
            wanted -= (0.3 if t else 0.7) * (1 - p) ** gamma * np.log(p)
    np.testing.assert_allclose(loss, 2 * wanted / max(count, 1), rtol=1e-5)
    assert_gradients("SoftmaxFocalLoss", inputs, [0], 2, **arguments)
    assert_run("GroupSpatialSoftmax", [X], probabilities, num_classes=3)
    assert_gradients("GroupSpatialSoftmax", [X], [0], num_classes=3)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_certain_answers_have_finite_gradients(gamma: float) -> None:
    x = np.array([90, -90, -90, -200, 90, 0], "float32").reshape(1, 6, 1, 1)
    inputs = [x, np.array([0, 0], "int32").reshape(1, 2, 1, 1), np.ones((), "float32")]
    for kind, outputs in (("SoftmaxFocalLoss", 2), ("SigmoidFocalLoss", 1)):
        workspace.ResetWorkspace()
        for index, value in enumerate(inputs):
            workspace.FeedBlob(f"x{index}", value)
        net = core.Net("certain")
        made = net.__getattr__(kind)(["x0", "x1", "x2"], outputs, gamma=gamma, num_classes=3)
        gradients = net.AddGradientOperators([made[0] if outputs == 2 else made])
        workspace.RunNetOnce(net)
        assert np.isfinite(workspace.FetchBlob(gradients["x0"])).all()


@pytest.mark.parametrize(
    ("kind", "inputs", "arguments", "sentence"),
    [
        ("SmoothL1Loss", [X, X[:1], X, X], {}, "must have the same first extent"),
        ("SmoothL1Loss", [X, X, X[:1], X], {}, "input of the inside weights has 36 values"),
        ("SmoothL1Loss", [X] * 4, {"beta": 0.0}, "beta is 0.0, it must be above 0"),
        ("GroupSpatialSoftmax", [X], {"num_classes": 4}, "not a multiple of num_classes=4"),
        (
            "SoftmaxFocalLoss",
            [X, np.full((2, 2, 3, 2), 3, "int32"), np.ones((), "float32")],
            {"num_classes": 3},
            "the label 3 is not one of -1 to 2",
        ),
    ],
)
def test_refusals(
    kind: str, inputs: list[Array], arguments: dict[str, float], sentence: str
) -> None:
    with pytest.raises(Exception, match=sentence):
        run(kind, inputs, 2 if kind == "SoftmaxFocalLoss" else 1, **arguments)
