"""The drawn cars and boats: the same in each run, and the two classes differ in shape only."""

from __future__ import annotations

import cv2
import numpy as np

from poseidon.caffe.data.prepare.two_class import SIDES, draw_labels, draw_picture


def pixels(number: int, label: int, seed: int = 0) -> np.ndarray:
    return cv2.imdecode(
        np.frombuffer(draw_picture(number, label, seed=seed), np.uint8), cv2.IMREAD_COLOR
    )


def test_a_picture_depends_on_seed_number_and_label() -> None:
    assert draw_picture(3, 1, seed=5) == draw_picture(3, 1, seed=5)
    assert (
        len({draw_picture(n, label, seed=s) for n in (0, 1) for label in (0, 1) for s in (0, 1)})
        == 8
    )


def test_the_classes_differ_in_shape_only() -> None:
    """Of one number and seed, both have the same size and background."""
    for number in range(5):
        car, boat = pixels(number, 0), pixels(number, 1)
        assert car.shape == boat.shape
        assert SIDES[0] <= min(car.shape[:2]) <= max(car.shape[:2]) <= SIDES[1]
        corner = np.abs(car[:6, :6].mean((0, 1)) - boat[:6, :6].mean((0, 1)))
        assert corner.max() < 6
        assert np.abs(car.astype(int) - boat).max() > 40


def test_labels_are_as_many_of_each() -> None:
    labels = draw_labels(21, seed=1)
    assert sorted(np.bincount(labels)) == [10, 11]
    assert labels.tolist() != sorted(labels.tolist())
