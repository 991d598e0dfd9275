"""The transform against Caffe's arithmetic."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from poseidon.caffe.data.batches.transform import Transform
from poseidon.caffe.data.datum import Decoding
from poseidon.caffe.data.mean import mean_blob
from poseidon.caffe.proto.caffe_pb2 import TransformationParameter
from poseidon.errors import DataError

N, C, H, W = 6, 3, 7, 9
SHAPE = (C, H, W)
MEAN = np.random.default_rng(5).uniform(0, 255, SHAPE).astype(np.float32)
IMAGES = np.random.default_rng(6).integers(0, 256, (N, *SHAPE), np.uint8)
DRAWS = np.random.default_rng(7).integers(0, 2**31, (N, 3))


def caffes(
    image: npt.NDArray[np.uint8],
    draw: npt.NDArray[np.int64],
    *,
    train: bool,
    crop: int,
    mirror: bool,
    mean: npt.NDArray[np.float32],
    scale: float,
) -> npt.NDArray[np.float32]:
    """data_transformer.cpp, Transform(datum, transformed_data), in float32."""
    height = width = crop
    top = left = 0
    if not crop:
        height, width = H, W
    elif train:
        top, left = draw[0] % (H - crop + 1), draw[1] % (W - crop + 1)
    else:
        top, left = (H - crop) // 2, (W - crop) // 2
    whole = (image.astype(np.float32) - mean) * np.float32(scale)
    part = whole[:, top : top + height, left : left + width]
    return part[..., ::-1] if mirror and draw[2] % 2 else part


MEANS = {
    "none": ({}, np.zeros((1, 1, 1), np.float32)),
    "file": ({"mean_file": "mean.binaryproto"}, MEAN),
    "one value": ({"mean_value": [12.5]}, np.full((1, 1, 1), 12.5, np.float32)),
    "values": (
        {"mean_value": [1.5, 2.5, 99]},
        np.array([1.5, 2.5, 99], np.float32).reshape(3, 1, 1),
    ),
}


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("train", [True, False])
def test_the_numbers_are_those_of_caffes_loops(tmp_path: Path, mean: str, train: bool) -> None:
    for case in product((0, 4, 7), (True, False), (1, 0.00390625, 0.017), (np.uint8, np.float32)):
        assert_caffes_numbers(tmp_path, mean, train, *case)


def assert_caffes_numbers(
    tmp_path: Path,
    mean: str,
    train: bool,
    crop: int,
    mirror: bool,
    scale: float,
    kind: type[np.generic],
) -> None:
    (tmp_path / "mean.binaryproto").write_bytes(mean_blob(MEAN))
    fields, values = MEANS[mean]
    param = TransformationParameter(crop_size=crop, mirror=mirror, scale=scale, **fields)
    transform = Transform(param, train=train, resolve=lambda name: tmp_path / name)
    expected = [
        caffes(image, draw, train=train, crop=crop, mirror=mirror, mean=values, scale=scale)
        for image, draw in zip(IMAGES, DRAWS, strict=True)
    ]
    images = IMAGES.astype(kind)
    out = np.full((N, *transform.output_shape(SHAPE)), np.nan, np.float32)
    transform.batch(images, DRAWS, out)
    case = f"crop {crop}, mirror {mirror}, scale {scale}, {kind}"
    np.testing.assert_array_equal(out, expected, case)
    for image, draw, target in zip(images, DRAWS, out, strict=True):
        target.fill(np.nan)
        transform.one(image, draw, target)
    np.testing.assert_array_equal(out, expected, case)


def make(**fields: object) -> Transform:
    return Transform(TransformationParameter(**fields), train=True, resolve=Path)  # type: ignore[arg-type]


def test_draws_are_of_three_lanes() -> None:
    assert make().draws(3, np.arange(5)).shape == (5, 3)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Decoding.AS_STORED),
        ({"force_color": True}, Decoding.COLOR),
        ({"force_gray": True}, Decoding.GRAY),
    ],
)
def test_decoding(fields: dict[str, bool], expected: Decoding) -> None:
    assert make(**fields).decoding is expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mean_file": "m", "mean_value": [1]}, "both mean_file and mean_value"),
        ({"force_color": True, "force_gray": True}, "both force_color and force_gray"),
        ({"mean_file": "/nowhere/mean"}, "mean file /nowhere/mean cannot be read: No such file"),
    ],
)
def test_parameters_that_contradict_each_other(fields: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"crop_size": 8}, "crop_size 8 is larger than the images, which are 3 x 7 x 9"),
        (
            {"mean_value": [1, 2]},
            "2 values of mean_value.*3 channels; give one value, or one for each",
        ),
        ({"mean_file": "mean"}, "is 3 x 7 x 8 .*but the images are 3 x 7 x 9"),
    ],
)
def test_pictures_that_do_not_suit(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    (tmp_path / "mean").write_bytes(mean_blob(MEAN[:, :, :8]))
    param = TransformationParameter(**fields)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message):
        Transform(param, train=True, resolve=lambda name: tmp_path / name).output_shape(SHAPE)
