"""The built-in pictures: the same every time, ten classes, learnable, not by colour alone."""

from __future__ import annotations

import numpy as np

from poseidon.caffe.data.prepare.procedural import SHAPES, draw_images


def test_the_same_seed_gives_the_same_pictures() -> None:
    one, again, other = draw_images(120, seed=1), draw_images(120, seed=1), draw_images(120, seed=2)
    np.testing.assert_array_equal(one.images, again.images)
    np.testing.assert_array_equal(one.labels, again.labels)
    assert not np.array_equal(one.images, other.images)


def test_form_and_balance() -> None:
    drawn = draw_images(1230, seed=3)
    assert drawn.images.shape == (1230, 3, 32, 32)
    assert drawn.images.dtype == drawn.labels.dtype == np.uint8
    assert np.bincount(drawn.labels).tolist() == [123] * 10
    assert (drawn.labels[:50] != np.arange(50) % 10).any(), "in random order"
    assert len(SHAPES) == 10


def test_colours_say_nothing_about_the_class() -> None:
    drawn = draw_images(4000, seed=4)
    colours = drawn.images.mean(axis=(2, 3))
    means = np.array([colours[drawn.labels == label].mean(axis=0) for label in range(10)])
    assert np.ptp(means, axis=0).max() < colours.std(), "classes differ less than pictures do"


def test_every_shape_fills_a_fair_part_of_its_frame() -> None:
    v, u = np.mgrid[-1.5:1.5:200j, -1.5:1.5:200j].astype(np.float32)
    for shape in SHAPES.values():
        assert 0.05 < (shape(u, v) < 0).mean() < 0.35, shape.__name__
