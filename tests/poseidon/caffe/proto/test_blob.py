"""BlobProto to array and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.proto.blob import blob_shape, from_array, to_array
from poseidon.caffe.proto.caffe_pb2 import BlobProto
from poseidon.caffe.proto.text import parse

READABLE = [
    # prototxt, shape, numbers
    ("shape { dim: 2 dim: 1 } data: [1, 2]", (2, 1), [1, 2]),
    ("num: 1 channels: 2 height: 1 width: 1 data: [1, 2]", (1, 2, 1, 1), [1, 2]),
    ("shape { dim: 2 } double_data: [0.5, 2]", (2,), [0.5, 2]),
    ("shape { dim: 1 } data: 7 double_data: 8", (1,), [8]),
    ("data: 3", (), [3]),
    ("shape { dim: 0 dim: 4 }", (0, 4), []),
    ("num: 0", (0, 0, 0, 0), []),
    # As in Caffe the old form goes first, even when it is incomplete.
    ("num: 2 shape { dim: 2 }", (2, 0, 0, 0), []),
]

BROKEN = [
    ("shape { dim: 3 } data: [1, 2]", r"blob of shape \(3,\) has 2 values, expected 3"),
    ("shape { dim: 3 }", "has 0 values, expected 3"),
    ("data: [1, 2]", r"shape \(\) has 2 values, expected 1"),
    ("", "has 0 values, expected 1"),
    ("shape { dim: -2 dim: -1 } data: [1, 2]", r"\(-2, -1\) has a negative extent"),
    ("num: 1 channels: 1 height: 1 width: 1 data: [1, 2]", "has 2 values, expected 1"),
]

ARRAYS = [
    np.float32(3),
    np.zeros((0, 4), np.float32),
    np.arange(6, dtype=np.float32).reshape(1, 2, 3),
    np.arange(6, dtype=np.int64),
    np.asfortranarray(np.arange(12, dtype=np.float64).reshape(3, 4)),
    np.arange(20, dtype=np.float32)[::2],
    np.array([np.nan, np.inf, -0.0, 1e-45], np.float32),
    np.zeros(5000, np.float32),
]


@pytest.mark.parametrize("text, shape, numbers", READABLE)
def test_to_array(text: str, shape: tuple[int, ...], numbers: list[float]) -> None:
    blob = parse(text, BlobProto(), source="")
    array = to_array(blob)
    assert (array.dtype, array.shape, array.ravel().tolist()) == (np.float32, shape, numbers)
    assert blob_shape(blob) == shape


@pytest.mark.parametrize("text, message", BROKEN)
def test_a_shape_that_does_not_fit_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_array(parse(text, BlobProto(), source=""))


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_from_array_and_back(array: np.ndarray) -> None:
    blob = BlobProto.FromString(from_array(array).SerializeToString())
    assert list(blob.shape.dim) == list(array.shape)
    assert to_array(blob).tobytes() == np.ascontiguousarray(array, np.float32).tobytes()
    assert to_array(blob).shape == array.shape


def test_from_array_fills_the_message_as_protobuf_would() -> None:
    expected = BlobProto()
    expected.shape.dim.extend([2, 70])
    expected.data.extend(range(140))
    assert from_array(np.arange(140).reshape(2, 70)) == expected


def test_the_array_outlives_the_blob_and_may_be_written() -> None:
    blob = from_array(np.ones(4))
    array = to_array(blob)
    array[0] = 5
    assert blob.data[0] == 1
    del blob
    assert array.tolist() == [5, 1, 1, 1]


def test_reads_a_mean_image_of_caffe(shared: Path) -> None:
    path = shared / "data" / "models" / "cifar10_full_h5" / "mean.binaryproto"
    mean = to_array(BlobProto.FromString(path.read_bytes()))
    assert mean.shape == (1, 3, 32, 32)
    # The mean of all training pixels, by channel, of red, green and blue.
    assert mean.mean(axis=(0, 2, 3)) == pytest.approx([125.3, 123.0, 113.9], abs=0.1)
