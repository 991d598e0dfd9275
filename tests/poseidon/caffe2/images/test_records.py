"""Records of images: both formats, all label types, and what is said of a record of another
format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poseidon.caffe.data.datum import encode_datum
from poseidon.caffe.proto.caffe_pb2 import Datum
from poseidon.caffe2 import workspace
from poseidon.caffe2.proto.caffe2_pb2 import TensorProto, TensorProtos
from tests.support.caffe2_images import database, encoded, image_input, picture, protos, reader


def read(
    tmp_path: Path, records: list[bytes], outputs: int = 2, **arguments: Any
) -> list[np.ndarray]:
    workspace.ResetWorkspace()
    reader(database(tmp_path / "records", records))
    return image_input(outputs, **{"batch_size": len(records), **arguments})


def center(image: np.ndarray) -> np.ndarray:
    return image[2:10, 4:12]


def test_pixels_and_encoded_images(tmp_path: Path) -> None:
    records = [protos(picture(0)), protos(encoded(picture(1)))]
    data, _ = read(tmp_path, records)
    np.testing.assert_array_equal(data, np.stack([center(picture(n)) for n in range(2)]))


def test_datums(tmp_path: Path) -> None:
    records = [
        encode_datum(picture(0).transpose(2, 0, 1), 5),
        Datum(data=encoded(picture(1)), label=6, encoded=True).SerializeToString(),
    ]
    data, label = read(tmp_path, records, use_caffe_datum=1)
    np.testing.assert_array_equal(data, np.stack([center(picture(n)) for n in range(2)]))
    assert label.tolist() == [5, 6]


def test_gray_becomes_color_and_color_gray(tmp_path: Path) -> None:
    gray = picture(0, channels=1)
    data, _ = read(tmp_path, [protos(gray), protos(encoded(gray)), protos(gray[..., np.newaxis])])
    for image in data:
        np.testing.assert_array_equal(image, np.repeat(center(gray)[..., np.newaxis], 3, 2))
    data, _ = read(tmp_path, [protos(picture(1))], color=0)
    weighted = center(picture(1)) @ np.array([0.114, 0.587, 0.299])
    assert data.shape == (1, 8, 8, 1)
    np.testing.assert_allclose(data[0, :, :, 0], weighted, atol=1)


@pytest.mark.parametrize(
    ("label_type", "given", "expected"),
    [
        (0, [(3,)], [3]),
        (0, [(0.5,)], [0.5]),
        (4, [(3, 0.25)], [3]),
        (1, [([0, 2],)], [[1, 0, 1, 0]]),
        (2, [([5, 6, 7, 8],)], [[5, 6, 7, 8]]),
        (5, [([0.5, 1.5, 2.5, 3.5],)], [[0.5, 1.5, 2.5, 3.5]]),
        (3, [([0, 3], [0.5, 0.25])], [[0.5, 0, 0, 0.25]]),
    ],
)
def test_labels(
    tmp_path: Path, label_type: int, given: list[tuple[Any, ...]], expected: list[Any]
) -> None:
    records = [protos(picture(0), *values) for values in given]
    _, label = read(tmp_path, records, label_type=label_type, num_labels=4)
    assert label.tolist() == expected
    floats = label_type in (3, 5) or isinstance(expected[0], float)
    assert label.dtype == (np.float32 if floats else np.int32)


def test_further_outputs_and_a_box(tmp_path: Path) -> None:
    image = picture(0, 20, 24)
    records = [protos(image, 1, 0.5, [7, 8]), protos(image, 2, 1.5, [9, 10], [3, 4, 12, 16])]
    data, label, weight, pair = read(
        tmp_path, records, 4, output_sizes=[1, 2], minsize=12, scale=-1
    )
    assert label.tolist() == [1, 2]
    assert weight.tolist() == [[0.5], [1.5]]
    assert pair.tolist() == [[7, 8], [9, 10]]
    np.testing.assert_array_equal(data[0], image[6:14, 8:16])
    np.testing.assert_array_equal(data[1], image[3:15, 4:20][2:10, 4:12])


def float_image() -> bytes:
    message = TensorProtos()
    message.protos.add(data_type=TensorProto.FLOAT, dims=[3, 2, 2], float_data=[0.0] * 12)
    message.protos.add(data_type=TensorProto.INT32, int32_data=[1])
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("record", "arguments", "message"),
    [
        (b"\xff", {}, "it is not a TensorProtos; expected a TensorProtos with an encoded image"),
        (encode_datum(picture(0).transpose(2, 0, 1), 5), {}, "it is a Caffe Datum"),
        (protos(picture(0)), {"use_caffe_datum": 1}, "it is a TensorProtos"),
        (b"\xff", {"use_caffe_datum": 1}, "expected a Caffe Datum with an image"),
        (
            encode_datum(np.zeros((3, 2, 2), np.float32), 1),
            {"use_caffe_datum": 1},
            "floating-point values",
        ),
        (
            encode_datum(np.zeros((2, 2, 2), np.uint8), 1),
            {"use_caffe_datum": 1},
            "has 2 channels, not 1 or 3",
        ),
        (float_image(), {}, "first tensor is of type FLOAT; TensorProtosDBInput reads tensors"),
        (protos(b"no picture"), {}, "cannot be decoded"),
        (protos(encoded(picture(0))[:200]), {}, "truncated|cannot be decoded"),
        (protos(picture(0), 1, 2, 3), {}, "it has 4 tensors, not 2"),
        (protos(picture(0), [1, 2]), {}, "the label has 2 values, not 1"),
        (protos(picture(0), 1, 2), {}, "not a bounding box"),
        (
            protos(picture(0), [4]),
            {"label_type": 1, "num_labels": 4},
            r"labels \[4\] are not from 0 to 3",
        ),
        (protos(picture(0, channels=2)), {}, r"dimensions \[12, 16, 2\]"),
    ],
)
def test_a_record_of_another_format(
    tmp_path: Path, record: bytes, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(
        RuntimeError, match=f"the record '000' of the database .*records .*{message}"
    ):
        read(tmp_path, [record], **arguments)


def test_labels_of_two_types(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"record '001'.*values of type float32, not int32"):
        read(tmp_path, [protos(picture(0), 1), protos(picture(1), 0.5)])
