"""Classifier and Detector on a net that tells the mean colour of what it sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import poseidon.pycaffe as caffe
from poseidon.errors import UsageError
from tests.poseidon.pycaffe.conftest import Write

MEAN_COLOUR = """
input: "data" input_shape { dim: 4 dim: 3 dim: 8 dim: 8 }
layer { name: "scale" type: "Scale" bottom: "data" top: "s" scale_param { filler { value: 1 } } }
layer { name: "mean" type: "Pooling" bottom: "s" top: "mean" pooling_param { pool: AVE global_pooling: true } }
"""
RED = np.array([200, 0, 0]) / 255.0


@pytest.fixture
def files(write: Write, tmp_path: Path) -> tuple[str, str]:
    model, weights = str(write(MEAN_COLOUR)), str(tmp_path / "w.caffemodel")
    caffe.Net(model, caffe.TEST).save(weights)
    return model, weights


@pytest.fixture
def picture(tmp_path: Path) -> str:
    """12 x 16; the right half is red, the left black."""
    bgr = np.zeros((12, 16, 3), np.uint8)
    bgr[:, 8:, 2] = 200
    path = str(tmp_path / "red.png")
    cv2.imwrite(path, bgr)
    return path


def test_predict_averages_ten_crops(files: tuple[str, str], picture: str) -> None:
    net = caffe.Classifier(*files, image_dims=(12, 16), raw_scale=255, channel_swap=(2, 1, 0))
    scores = net.predict([caffe.io.load_image(picture)] * 3)
    assert scores.shape == (3, 3)
    # Two corners see black, two red, the centre half of each.
    np.testing.assert_allclose(scores, np.tile([0, 0, 100], (3, 1)), rtol=1e-5)


def test_predict_by_the_centre(files: tuple[str, str], picture: str) -> None:
    net = caffe.Classifier(
        *files, image_dims=(12, 16), mean=np.array([0.0, 0.0, 0.25]), input_scale=2
    )
    scores = net.predict([caffe.io.load_image(picture)], oversample=False).reshape(-1)
    np.testing.assert_allclose(scores, [RED[0], 0, -0.5], rtol=1e-5)
    small = caffe.Classifier(*files)
    assert small.image_dims.tolist() == [8, 8]
    assert small.predict([caffe.io.load_image(picture)], oversample=False).shape == (1, 3, 1, 1)


@pytest.mark.parametrize("images", [[], ["cat.jpg"], [np.zeros((8, 8))]])
def test_what_is_not_a_list_of_images_is_named(files: tuple[str, str], images: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"expected a list of images \(H, W, K\)"):
        caffe.Classifier(*files).predict(images)


def test_detect_windows(files: tuple[str, str], picture: str) -> None:
    net = caffe.Detector(*files)
    found = net.detect_windows(
        [(picture, [(0, 0, 12, 8), np.array([0, 8, 12, 16]), (2, 4, 10, 12)])]
    )
    assert [d["filename"] for d in found] == [picture] * 3
    reds = [float(d["prediction"].ravel()[0]) for d in found]
    np.testing.assert_allclose(reds, [0, RED[0], RED[0] / 2], atol=1e-6)
    assert net.detect_windows([]) == []


def test_context_is_filled_with_the_mean(files: tuple[str, str], picture: str) -> None:
    mean = np.array([0.5, 0.25, 0.0])
    net = caffe.Detector(*files, mean=mean, context_pad=2)
    image = caffe.io.load_image(picture)
    crop = net.crop(image, np.array([0, 0, 12, 16]))
    assert crop.shape == (8, 8, 3)
    np.testing.assert_allclose(crop[0, 0], mean)
    np.testing.assert_allclose(crop[4, 5], RED, atol=1e-3)
    inner = net.crop(image, np.array([5, 10, 7, 12]))
    np.testing.assert_allclose(inner, np.tile(RED, (8, 8, 1)), atol=1e-6)


def test_the_mean_is_undone_for_the_filling(files: tuple[str, str]) -> None:
    net = caffe.Detector(
        *files, mean=np.array([1.0, 2.0, 3.0]), raw_scale=2, channel_swap=(2, 1, 0), context_pad=1
    )
    np.testing.assert_allclose(net.crop_mean[0, 0], [1.5, 1, 0.5])


@pytest.mark.parametrize("image_dims", [(4, 8), 8, (8, 8, 3)])
def test_image_dims_must_hold_a_crop(files: tuple[str, str], image_dims: object) -> None:
    with pytest.raises(UsageError, match=r"at least the net's input, \(8, 8\)"):
        caffe.Classifier(*files, image_dims=image_dims)


def test_errors(files: tuple[str, str], picture: str) -> None:
    net = caffe.Detector(*files)
    with pytest.raises(UsageError, match="is outside the image of 12 x 16"):
        net.detect_windows([(picture, [(0, 0, 99, 99)])])
    with pytest.raises(UsageError, match="selective search needs the package"):
        net.detect_selective_search([picture])
