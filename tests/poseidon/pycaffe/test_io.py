"""Pictures for nets."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

import poseidon.pycaffe as caffe
from poseidon.errors import DataError, UsageError
from poseidon.pycaffe import io
from poseidon.pycaffe.proto import caffe_pb2


def gradient(height: int, width: int, channels: int = 3) -> np.ndarray:
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32)
    return np.stack([rows / height + k * columns / width for k in range(channels)], axis=2)


def test_load_image_is_red_first_from_0_to_1(tmp_path: Path) -> None:
    bgr = np.zeros((4, 6, 3), np.uint8)
    bgr[..., 2], bgr[0, 0] = 255, (51, 102, 204)
    path = str(tmp_path / "a.png")
    cv2.imwrite(path, bgr)
    image = io.load_image(path)
    assert image.shape == (4, 6, 3) and image.dtype == np.float32
    np.testing.assert_allclose(image[0, 0], [0.8, 0.4, 0.2], rtol=1e-6)
    np.testing.assert_allclose(image[1, 1], [1, 0, 0])
    grey = io.load_image(path, color=False)
    assert grey.shape == (4, 6, 1) and grey[1, 1, 0] == pytest.approx(0.2125)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (np.full((2, 3), 51, np.uint8), 0.2),
        (np.full((2, 3), 13107, np.uint16), 0.2),
        (np.full((2, 3, 4), 51, np.uint8), 0.2),
    ],
)
def test_grey_deep_and_transparent_files(
    tmp_path: Path, stored: np.ndarray, expected: float
) -> None:
    path = str(tmp_path / "a.png")
    cv2.imwrite(path, stored)
    image = io.load_image(path)
    assert image.shape == (2, 3, 3)
    np.testing.assert_allclose(image, expected, rtol=1e-6)
    assert io.load_image(path, color=False).shape == (2, 3, 1)


def test_what_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no image"):
        io.load_image(tmp_path / "none.png")
    (tmp_path / "text.png").write_text("no images")
    with pytest.raises(DataError, match="cannot be decoded"):
        io.load_image(tmp_path / "text.png")


@pytest.mark.parametrize("channels", [1, 2, 3, 7])
def test_resize_keeps_what_is_linear(channels: int) -> None:
    image = gradient(8, 12, channels)
    twice = io.resize_image(image, (16, 24))
    assert twice.shape == (16, 24, channels) and twice.dtype == np.float32
    back = io.resize_image(twice, (8, 12))
    np.testing.assert_allclose(back[1:-1, 1:-1], image[1:-1, 1:-1], atol=1e-5)
    np.testing.assert_array_equal(io.resize_image(np.full((3, 3, channels), 5.0), (2, 9)), 5)


def test_resize_by_nearest_and_wrong_orders() -> None:
    image = gradient(4, 4)
    assert set(io.resize_image(image, (8, 8), interp_order=0).ravel()) == set(image.ravel())
    with pytest.raises(UsageError, match="expected 0, 1, 2 or 3"):
        io.resize_image(image, (8, 8), interp_order=5)


def test_oversample_takes_corners_centre_and_mirrors() -> None:
    images = [
        np.arange(6 * 8 * 2, dtype=np.float32).reshape(6, 8, 2),
        np.zeros((6, 8, 2), np.float32),
    ]
    crops = io.oversample(images, (4, 4))
    assert crops.shape == (20, 4, 4, 2)
    first = images[0]
    for place, (top, left) in enumerate([(0, 0), (0, 4), (2, 0), (2, 4), (1, 2)]):
        expected = first[top : top + 4, left : left + 4]
        np.testing.assert_array_equal(crops[place], expected)
        np.testing.assert_array_equal(crops[place + 5], expected[:, ::-1])
    assert not crops[10:].any()


@pytest.fixture
def transformer() -> io.Transformer:
    made = io.Transformer({"data": (10, 3, 4, 5)})
    made.set_transpose("data", (2, 0, 1))
    made.set_channel_swap("data", (2, 1, 0))
    made.set_raw_scale("data", 255)
    made.set_mean("data", np.array([10.0, 20.0, 30.0]))
    made.set_input_scale("data", 0.5)
    return made


def test_preprocess_in_caffes_order(transformer: io.Transformer) -> None:
    image = gradient(4, 5)
    before = image.copy()
    found = transformer.preprocess("data", image)
    expected = (
        image[:, :, ::-1].transpose(2, 0, 1) * 255 - np.array([10, 20, 30])[:, None, None]
    ) * 0.5
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    np.testing.assert_array_equal(image, before)
    assert transformer.preprocess("data", gradient(9, 7)).shape == (3, 4, 5)


def test_deprocess_is_the_way_back(transformer: io.Transformer) -> None:
    image = gradient(4, 5)
    np.testing.assert_allclose(
        transformer.deprocess("data", transformer.preprocess("data", image)[None]), image, atol=1e-5
    )


def test_a_scale_of_none_is_no_scale(transformer: io.Transformer) -> None:
    transformer.set_raw_scale("data", None)
    transformer.set_input_scale("data", None)
    image = gradient(4, 5)
    found = transformer.preprocess("data", image)
    np.testing.assert_allclose(found[0], image[:, :, 2] - 10, rtol=1e-4)
    np.testing.assert_allclose(transformer.deprocess("data", found), image, atol=1e-5)


def test_a_mean_picture_is_resized(transformer: io.Transformer) -> None:
    mean = np.moveaxis(gradient(8, 10), 2, 0)
    transformer.set_mean("data", mean)
    assert transformer.mean["data"].shape == (3, 4, 5)
    single = io.Transformer({"x": (1, 1, 4, 5)})
    single.set_mean("x", np.ones((4, 5)))
    assert single.mean["x"].shape == (1, 4, 5)


def test_errors(transformer: io.Transformer) -> None:
    with pytest.raises(UsageError, match="did you mean 'data'"):
        transformer.preprocess("dta", gradient(4, 5))
    with pytest.raises(UsageError, match="expected 3 axes"):
        transformer.set_transpose("data", (0, 1))
    with pytest.raises(UsageError, match="expected 3 channels"):
        transformer.set_channel_swap("data", (0, 1))
    with pytest.raises(ValueError, match="expected 3"):
        transformer.set_mean("data", np.ones(4))
    with pytest.raises(ValueError, match=r"expected \(K,\) or \(K, H, W\)"):
        transformer.set_mean("data", np.ones((1, 3, 4, 5)))
    with pytest.raises(ValueError, match="image has shape \\(9, 9\\), expected \\(H, W, K\\)"):
        transformer.preprocess("data", np.ones((9, 9)))
    with pytest.raises(ValueError, match="image has shape \\(4, 5\\), expected \\(H, W, K\\)"):
        transformer.preprocess("data", np.ones((4, 5)))


def blob_of(count: int, **fields: int) -> caffe_pb2.BlobProto:
    return caffe_pb2.BlobProto(data=np.arange(count).tolist(), **fields)


def test_all_names_have_the_same_message_classes() -> None:
    assert caffe.proto.caffe_pb2 is caffe_pb2 is io.caffe_pb2


def test_old_and_new_shapes() -> None:
    old = blob_of(100, num=1, channels=1, height=10, width=10)
    assert io.blobproto_to_array(old).shape == (1, 1, 10, 10)
    new = blob_of(100)
    new.shape.dim.extend([10, 10])
    assert io.blobproto_to_array(new).shape == (10, 10)
    assert io.blobproto_to_array(blob_of(1)) == 0  # no shape: one number
    with pytest.raises(ValueError, match="reshape"):
        io.blobproto_to_array(blob_of(100))


def test_blobs_round_trip_with_their_diffs() -> None:
    array = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    blob = io.array_to_blobproto(array, diff=-array)
    np.testing.assert_array_equal(io.blobproto_to_array(blob), array)
    np.testing.assert_array_equal(io.blobproto_to_array(blob, return_diff=True), -array)
    doubles = caffe_pb2.BlobProto(double_data=[1.5, 2.5])
    doubles.shape.dim.append(2)
    np.testing.assert_array_equal(io.blobproto_to_array(doubles), [1.5, 2.5])


def test_vectors_of_blobs_round_trip() -> None:
    arrays = [np.ones((2, 3)), np.arange(4.0)]
    found = io.blobprotovector_str_to_arraylist(io.arraylist_to_blobprotovector_str(arrays))
    for mine, theirs in zip(arrays, found, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_datums_round_trip(dtype: type) -> None:
    array = np.random.default_rng(0).integers(0, 255, size=(3, 4, 5)).astype(dtype)
    datum = io.array_to_datum(array, label=7)
    assert (datum.channels, datum.height, datum.width, datum.label) == (3, 4, 5, 7)
    assert bool(datum.data) == (dtype is np.uint8)
    np.testing.assert_array_equal(io.datum_to_array(datum), array)


def test_a_datum_without_a_label_has_none() -> None:
    array = np.ones((3, 4, 5))
    assert not io.array_to_datum(array).HasField("label")
    assert io.array_to_datum(array, label=0).HasField("label")


def test_encoded_datums_are_decoded() -> None:
    picture = np.random.default_rng(0).integers(0, 255, size=(4, 5, 3)).astype(np.uint8)
    datum = caffe_pb2.Datum(encoded=True, data=cv2.imencode(".png", picture)[1].tobytes())
    np.testing.assert_array_equal(io.datum_to_array(datum), picture.transpose(2, 0, 1))


def test_what_cannot_be_a_datum() -> None:
    with pytest.raises(ValueError, match=r"expected \(C, H, W\)"):
        io.array_to_datum(np.ones((3, 4)))
    with pytest.raises(DataError):
        io.datum_to_array(caffe_pb2.Datum(channels=1, height=2, width=2, data=b"123"))
