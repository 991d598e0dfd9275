"""Pixels that become floats on a GPU: the bits of the host's floats, without a wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from google.protobuf import text_format
from torch import Tensor

from poseidon.caffe.data.batches.images import ImageMaker, ImagePlan, read_list
from poseidon.caffe.data.batches.numbered import NumberedReader, Share
from poseidon.caffe.data.batches.reader import DatumMaker, DatumPlan, open_maker
from poseidon.caffe.data.batches.transform import Transform
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_datum
from poseidon.caffe.data.mean import write_mean
from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.layers.sources import ReadingSource
from poseidon.caffe.proto.caffe_pb2 import TRAIN, LayerParameter, TransformationParameter
from tests.support.databases import make_database
from tests.support.simulated_device import SimulatedDevice, simulated_devices

SHAPE = (3, 9, 11)
RECORDS, BATCH = 7, 4
CPU = torch.device("cpu")
TRANSFORMS = {
    "nothing": "",
    "scale": "scale: 0.00390625",
    "mirror": "mirror: true",
    "crop, mirror, values": "crop_size: 5 mirror: true mean_value: 104 mean_value: 117.3 "
    "mean_value: 123 scale: 0.017",
    "crop, mirror, mean file": 'crop_size: 5 mirror: true mean_file: "mean" scale: 0.1',
    "mean file": 'mean_file: "mean"',
    "SSD's steps": "crop_size: 3 mirror: true mean_value: 9 resize_param { height: 6 width: 7 } "
    "distort_param { brightness_prob: 0.9 brightness_delta: 40 }",
}


def image(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SHAPE, np.uint8)


def encoded(number: int) -> bytes:
    found, content = cv2.imencode(".png", image(number).transpose(1, 2, 0))
    assert found
    return content.tobytes()


def raw_records(folder: Path, plan: dict[str, Any]) -> NumberedReader[Any]:
    return database(folder, plan, lambda n: encode_datum(image(n), n))


def float_record_among_bytes(folder: Path, plan: dict[str, Any]) -> NumberedReader[Any]:
    def record(number: int) -> bytes:
        own = image(number)
        return encode_datum(own.astype(np.float32) / 3 if number == 5 else own, number)

    return database(folder, plan, record)


def database(
    folder: Path, plan: dict[str, Any], record: Callable[[int], bytes]
) -> NumberedReader[Any]:
    path = folder / "db"
    if not path.exists():
        make_database(path, Backend.LMDB, [(b"%d" % n, record(n)) for n in range(RECORDS)])
    maker = open_maker(path, Backend.LMDB, lambda cursor: DatumMaker(cursor, DatumPlan(**plan)))
    return NumberedReader(path, maker, device=plan["device"])


def list_of_images(folder: Path, plan: dict[str, Any]) -> NumberedReader[Any]:
    for number in range(RECORDS):
        (folder / f"{number}.png").write_bytes(encoded(number))
    (folder / "list").write_text("".join(f"{n}.png {n}\n" for n in range(RECORDS)))
    lines = read_list(folder / "list", f"{folder}/")
    maker = ImageMaker(folder / "list", lines, ImagePlan(**plan))
    return NumberedReader(folder / "list", maker, device=plan["device"])


class Reading(ReadingSource):
    """A layer around a reader."""


def batches(
    make: Callable[[Path, dict[str, Any]], NumberedReader[Any]],
    folder: Path,
    text: str,
    device: torch.device,
    *,
    train: bool,
) -> list[list[Tensor]]:
    transform = Transform(
        text_format.Parse(text, TransformationParameter()),
        train=train,
        resolve=lambda name: folder / name,
    )
    plan = {"batch_size": BATCH, "transform": transform, "share": Share(), "seed": 3}
    layer = Reading(
        LayerParameter(top=["data", "label"]), LayerContext(phase=TRAIN, seed=3, device=device)
    )
    with make(folder, plan | {"device": device}) as layer.reader:
        found = []
        for _ in range(4):
            tops = layer.forward()
            assert isinstance(tops, tuple)
            found.append([top.clone() for top in tops])
        return found


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("text", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("make", [raw_records, float_record_among_bytes, list_of_images])
def test_a_gpu_has_the_bits_of_the_host(
    make: Callable[[Path, dict[str, Any]], NumberedReader[Any]],
    text: str,
    train: bool,
    tmp_path: Path,
) -> None:
    if make is float_record_among_bytes and "resize" in text:
        pytest.skip("SSD's steps need bytes")
    write_mean(tmp_path / "mean", np.random.default_rng(9).random(SHAPE, np.float32) * 255)
    expected = batches(make, tmp_path, text, CPU, train=train)
    for seed in (0, 5):
        with simulated_devices(1, seed) as (device,):
            found = batches(make, tmp_path, text, device.torch, train=train)
            for ours, theirs in zip(found, expected, strict=True):
                for a, b in zip(ours, theirs, strict=True):
                    np.testing.assert_array_equal(a.cpu().numpy(), b.numpy())


def sent(device: SimulatedDevice, make: Any, folder: Path) -> float:
    """Return the bytes of a record that are copied to the device."""
    batches(make, folder, "crop_size: 5 mirror: true", device.torch, train=True)
    assert not device.waits
    return device.bytes["in"] / device.copies["in"] * 3 / BATCH


def test_bytes_travel_and_training_waits_for_none(tmp_path: Path) -> None:
    with simulated_devices(1, 5) as (device,):
        # the pixels of the crop, three numbers of its place, and the label
        assert sent(device, raw_records, tmp_path) == 3 * 5 * 5 + 3 * 8 + 4
