"""The built-in pictures: the same every time, ten classes, learnable, not by colour alone."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import cv2
import numpy as np
from google.protobuf import text_format

from poseidon.caffe.data.prepare.procedural import (
    SHAPES,
    draw_images,
    draw_scene,
    write_detection_set,
)
from poseidon.caffe.proto.caffe_pb2 import LabelMap


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


def test_a_scene_depends_on_seed_and_number_only() -> None:
    first, again, other = draw_scene(3, seed=1), draw_scene(3, seed=1), draw_scene(4, seed=1)
    assert np.array_equal(first.image, again.image)
    assert not np.array_equal(first.image, other.image)
    assert not np.array_equal(first.image, draw_scene(3, seed=2).image)


def test_boxes_bound_the_pixels_of_their_class() -> None:
    counts, labels = set(), set()
    for number in range(60):
        scene = draw_scene(number, size=(48, 64))
        assert scene.image.shape == (48, 64, 3)
        assert len(scene.boxes) == len(scene.labels) > 0
        counts.add(len(scene.labels))
        labels.update(scene.labels)
        covered = np.zeros_like(scene.mask, dtype=bool)
        for label, (left, top, right, bottom) in zip(scene.labels, scene.boxes, strict=True):
            part = scene.mask[top:bottom, left:right] == label
            assert part[0].any() and part[-1].any() and part[:, 0].any() and part[:, -1].any()
            covered[top:bottom, left:right] = True
        assert not scene.mask[~covered].any()
        # Shapes are lighter than the background.
        assert scene.image[scene.mask > 0].mean() > scene.image[scene.mask == 0].mean() + 30
    assert counts == {1, 2, 3} and labels == {1, 2, 3}


def test_a_detection_set(tmp_path: Path) -> None:
    listed = write_detection_set(tmp_path, 3, first=7, seed=5, size=(40, 50))
    lines = [line.split() for line in listed.read_text().splitlines()]
    assert lines[0] == ["images/000007.png", "annotations/000007.xml"]
    scene = draw_scene(9, seed=5, size=(40, 50))
    image, annotation = (tmp_path / name for name in lines[2])
    assert np.array_equal(cv2.imread(str(image)), scene.image)
    root = ElementTree.parse(annotation).getroot()
    boxes = [
        [int(item.findtext(f"bndbox/{side}") or 0) for side in ("xmin", "ymin", "xmax", "ymax")]
        for item in root.iter("object")
    ]
    assert boxes == scene.boxes.tolist()
    assert (root.findtext("size/height"), root.findtext("size/width")) == ("40", "50")
    items = text_format.Parse((tmp_path / "labelmap.prototxt").read_text(), LabelMap()).item
    assert [(item.name, item.label) for item in items][1:] == [
        ("disc", 1),
        ("square", 2),
        ("triangle", 3),
    ]
    assert (tmp_path / "sizes.txt").read_text().splitlines()[2] == "000009 40 50"
