"""Blobs and Datums between messages and numpy."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

import poseidon.pycaffe as caffe
from poseidon.errors import DataError
from poseidon.pycaffe import io
from poseidon.pycaffe.proto import caffe_pb2


def blob_of(count: int, **fields: int) -> caffe_pb2.BlobProto:
    return caffe_pb2.BlobProto(data=np.arange(count).tolist(), **fields)


def test_the_messages_are_the_same_by_every_name() -> None:
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
