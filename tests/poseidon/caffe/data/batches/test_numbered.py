"""Shares of the stream: together they are what one process reads, batch by batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from poseidon.caffe.data.batches.images import ImageMaker, ImagePlan, read_list
from poseidon.caffe.data.batches.numbered import NumberedReader, Share, part_path, source_for
from poseidon.caffe.data.batches.reader import DatumMaker, DatumPlan, open_maker
from poseidon.caffe.data.batches.transform import Transform
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_datum
from poseidon.caffe.data.mean import write_mean
from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.layers.sources import ReadingSource
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN, LayerParameter, TransformationParameter
from poseidon.errors import DataError
from tests.support.databases import make_database, worker_share
from tests.support.simulated_device import SimulatedDevice, simulated_devices

workers = st.integers(1, 6)
batches = st.integers(1, 5)


def batch_of(share: Share, number: int, size: int) -> list[int]:
    return [share.record(n) for n in range(number * size, (number + 1) * size)]


@given(count=workers, batch=batches, number=st.integers(0, 40))
def test_training_batches_together_are_the_batch_of_one_process(
    count: int, batch: int, number: int
) -> None:
    shares = [worker_share(TRAIN, rank, count, batch) for rank in range(count)]
    together = sorted(record for share in shares for record in batch_of(share, number, batch))
    assert together == list(range(number * count * batch, (number + 1) * count * batch))


@given(count=workers, batch=batches, number=st.integers(0, 40))
def test_test_batches_are_dealt_whole(count: int, batch: int, number: int) -> None:
    reader = worker_share(TEST, number % count, count, batch)
    assert batch_of(reader, number // count, batch) == list(
        range(number * batch, (number + 1) * batch)
    )


@given(
    clients=st.integers(1, 4),
    per_client=st.integers(1, 3),
    batch=batches,
    number=st.integers(0, 20),
)
def test_parts_dealt_round_robin_hold_the_same_batches(
    clients: int, per_client: int, batch: int, number: int
) -> None:
    """Record r of part k is record r * clients + k of the whole, whose number the share knows."""
    count = clients * per_client
    shares = [
        worker_share(TRAIN, rank, count, batch, clients=clients, shared=False)
        for rank in range(count)
    ]
    local = range(number * batch, (number + 1) * batch)
    together = sorted(share.record(n) * clients + share.client for share in shares for n in local)
    assert together == list(range(number * count * batch, (number + 1) * count * batch))
    assert together == sorted(
        int(n) for share in shares for n in share.job_records(local.start, batch)
    )


@pytest.mark.parametrize(
    "wrong", [{"first": 1}, {"first": -1}, {"step": 0}, {"block": 0}, {"client": 1}]
)
def test_what_is_no_share(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="invalid share"):
        Share(**wrong)


@pytest.mark.parametrize(
    ("existing", "shared_file_system", "client", "clients", "expected"),
    [
        (["db"], True, 1, 2, "db"),
        (["db", "db_0", "db_1"], True, 1, 2, "db"),
        (["db", "db_0", "db_1"], False, 0, 2, "db_0"),
        (["db_1"], False, 1, 2, "db_1"),
        (["db"], False, 0, 1, "db"),
        (["db", "db_0", "db_1"], False, 0, 1, "db"),
        (["db_0"], False, 0, 1, "db_0"),
        ([], False, 0, 1, "db"),
        ([], True, 0, 2, "db"),
    ],
)
def test_the_source_of_a_client(
    tmp_path: Path,
    existing: list[str],
    shared_file_system: bool,
    client: int,
    clients: int,
    expected: str,
) -> None:
    for name in existing:
        (tmp_path / name).mkdir()
    found = source_for(
        tmp_path / "db", shared_file_system=shared_file_system, client=client, clients=clients
    )
    assert found == tmp_path / expected


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            "db/data.mdb",
            ": write shared_file_system: true if all clients can read {}, or divide it with: ",
        ),
        (
            "other/x",
            ", nor does {}: make it first; then write shared_file_system: true if all clients can "
            "read it, "
            "or divide it with: ",
        ),
    ],
)
def test_the_error_for_a_missing_part_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / made).parent.mkdir()
    (tmp_path / made).write_text("")
    source = tmp_path / "db"
    with pytest.raises(DataError) as caught:
        source_for(source, shared_file_system=False, client=1, clients=3)
    assert str(caught.value) == (
        f"client 1 of 3 reads {source}_1 (shared_file_system is false), which does not "
        f"exist{says.format(source)}"
        "poseidon partition_data --num_partitions=3 db"
    )


def test_parts_for_more_clients_are_refused(tmp_path: Path) -> None:
    for part in range(3):
        part_path(tmp_path / "db", part).mkdir()
    with pytest.raises(DataError, match="db was divided for 3 clients, but this job has 2"):
        source_for(tmp_path / "db", shared_file_system=False, client=0, clients=2)


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
