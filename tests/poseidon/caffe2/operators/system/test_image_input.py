"""ImageInput: batches in order, the same on any number of devices and shards, and what no record
may be.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from poseidon.caffe2 import brew, core, model_helper, workspace
from poseidon.caffe2.proto import caffe2_pb2
from tests.support.caffe2_images import database, encoded, image_input, picture, protos, reader

OPTIONS: dict[str, Any] = {"batch_size": 2, "scale": 12, "crop": 8}


@pytest.fixture
def numbered(tmp_path: Path) -> str:
    """Seven pictures, whose labels are their numbers."""
    return database(tmp_path / "pictures", [protos(encoded(picture(n)), n) for n in range(7)])


def batches(
    path: str,
    count: int,
    devices: int = 1,
    net_type: str = "simple",
    shard: dict[str, Any] | None = None,
    **options: Any,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the batches of a net with one ImageInput for each device, joined for each run."""
    workspace.ResetWorkspace()
    torch.manual_seed(3)
    reader(path, **(shard or {}))
    net = core.Net("input")
    for device in range(devices):
        net.ImageInput("reader", [f"data_{device}", f"label_{device}"], **{**OPTIONS, **options})
    net.Proto().type, net.Proto().num_workers = net_type, 4
    workspace.CreateNet(net)
    found = []
    for _ in range(count):
        workspace.RunNet(net)
        found.append(
            tuple(
                np.concatenate(
                    [workspace.FetchBlob(f"{kind}_{device}") for device in range(devices)]
                )
                for kind in ("data", "label")
            )
        )
    return found


def test_a_test_batch_is_the_center_of_the_images(numbered: str) -> None:
    reader(numbered)
    data, label = image_input(mean=100.0, std=50.0)
    assert data.dtype == np.float32
    assert label.dtype == np.int32
    expected = (np.stack([picture(n)[2:10, 4:12] for n in range(2)]) - 100.0) / 50.0
    np.testing.assert_allclose(data, expected, atol=1e-6)
    assert label.tolist() == [0, 1]


def test_each_channel_may_have_its_own_mean(numbered: str) -> None:
    reader(numbered)
    data, _ = image_input(mean_per_channel=[1.0, 2.0, 3.0], std_per_channel=[2.0, 4.0, 8.0])
    np.testing.assert_allclose(
        data[0], (picture(0)[2:10, 4:12] - np.array([1, 2, 3])) / [2, 4, 8], atol=1e-5
    )


def test_batches_follow_each_other_and_wrap(numbered: str) -> None:
    labels = [label.tolist() for _, label in batches(numbered, 5)]
    assert labels == [[0, 1], [2, 3], [4, 5], [6, 0], [1, 2]]


@pytest.mark.parametrize("net_type", ["simple", "dag"])
def test_devices_share_a_reader_as_if_they_were_one(numbered: str, net_type: str) -> None:
    one = batches(numbered, 6, batch_size=6, mirror=1, color_jitter=1, color_lighting=1)
    three = batches(
        numbered, 6, devices=3, net_type=net_type, mirror=1, color_jitter=1, color_lighting=1
    )
    for (data, label), (other, others) in zip(one, three, strict=True):
        assert label.tolist() == others.tolist()
        np.testing.assert_array_equal(data, other)


@pytest.mark.parametrize("sizes", [[2, 2, 2], [1, 3, 2]])
def test_shards_read_what_one_process_would(numbered: str, sizes: list[int]) -> None:
    whole = batches(numbered, 4, batch_size=6, mirror=1)
    parts = [
        batches(
            numbered,
            4,
            batch_size=size,
            mirror=1,
            shard={"num_shards": 3, "shard_id": shard, "shard_sizes": sizes},
        )
        for shard, size in enumerate(sizes)
    ]
    for number, (data, label) in enumerate(whole):
        assert label.tolist() == np.concatenate([part[number][1] for part in parts]).tolist()
        np.testing.assert_array_equal(data, np.concatenate([part[number][0] for part in parts]))


def test_training_crops_and_mirrors_by_chance_and_repeatably(numbered: str) -> None:
    first = batches(numbered, 12, mirror=1)
    second = batches(numbered, 12, mirror=1)
    for (data, _), (other, _) in zip(first, second, strict=True):
        np.testing.assert_array_equal(data, other)
    seen = {bytes(data[place]) for data, label in first for place in range(2) if label[place] == 3}
    windows = {
        bytes(part.astype(np.float32).copy())
        for left in range(9)
        for top in range(5)
        for part in (
            picture(3)[top : top + 8, left : left + 8],
            picture(3)[top : top + 8, left : left + 8][:, ::-1],
        )
    }
    assert len(seen) > 1
    assert seen <= windows


def test_the_seed_of_the_operator_counts(numbered: str) -> None:
    found = []
    for seed in (1, 1, 2):
        workspace.ResetWorkspace()
        reader(numbered)
        option = core.DeviceOption(caffe2_pb2.CPU, random_seed=seed)
        found.append(image_input(is_test=0, mirror=1, device_option=option)[0])
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


def test_images_for_a_gpu_are_transposed(numbered: str) -> None:
    reader(numbered)
    plain, _ = image_input(mean=128.0, std=128.0)
    workspace.ResetWorkspace()
    reader(numbered)
    data, _ = image_input(
        mean=128.0, std=128.0, use_gpu_transform=1, output_type="float16", mirror=1
    )
    assert data.dtype == np.float16
    np.testing.assert_allclose(data, plain.transpose(0, 3, 1, 2), atol=1e-3)


def test_the_helper_gives_channels_first(numbered: str) -> None:
    model = model_helper.ModelHelper("input")
    made = model.CreateDB("reader", db=numbered, db_type="minidb")
    data, label = brew.image_input(model, made, ["data", "label"], is_test=1, **OPTIONS)
    workspace.RunNetOnce(model.param_init_net)
    workspace.RunNetOnce(model.net)
    assert (str(data), str(label)) == ("data", "label")
    np.testing.assert_array_equal(
        workspace.FetchBlob("data")[1], picture(1)[2:10, 4:12].transpose(2, 0, 1)
    )


def test_shapes_are_inferred_without_the_database() -> None:
    model = model_helper.ModelHelper("input")
    made = model.CreateDB("reader", db="nothing", db_type="minidb")
    brew.image_input(model, made, ["data", "label"], **OPTIONS)
    shapes, types = workspace.InferShapesAndTypes([model.param_init_net, model.net])
    assert shapes["data"] == [2, 3, 8, 8]
    assert shapes["label"] == [2]
    assert types["label"] == caffe2_pb2.TensorProto.INT32


def test_an_operator_may_have_a_database_of_its_own(numbered: str) -> None:
    operator = core.CreateOperator(
        "ImageInput", [], ["d", "l"], db=numbered, db_type="minidb", **OPTIONS
    )
    workspace.RunOperatorOnce(operator)
    assert workspace.FetchBlob("l").tolist() == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be above 0"),
        ({"crop": 0}, "crop must be above 0"),
        ({"minsize": 20}, "exactly one of scale and minsize"),
        ({"scale": 7}, "at least crop=8, not 7"),
        ({"mean_per_channel": [1.0, 2.0]}, "must have 1 or 3 values each, not 2 and 1"),
        ({"std": 0.0}, "std must not be 0"),
        ({"label_type": 1}, "label_type=1 needs num_labels"),
        ({"label_type": 6}, "label_type must be from 0 to 5"),
        ({"random_scale": [7, 9]}, "two lengths from crop=8 on"),
        ({"output_sizes": [1]}, "0 more outputs, 1 output_sizes"),
        ({"output_type": "double"}, "must be float or float16, not double"),
        ({"use_caffe_datum": 1, "outputs": 3}, "image and label"),
        ({"scale_jitter_type": 2}, "scale_jitter_type="),
        ({"decode_threads": 0}, "decode_threads must be above 0"),
    ],
)
def test_arguments_that_make_no_sense(
    numbered: str, arguments: dict[str, Any], message: str
) -> None:
    reader(numbered)
    with pytest.raises(RuntimeError, match=message):
        image_input(**arguments)


def test_an_input_that_is_no_reader() -> None:
    workspace.FeedBlob("reader", np.zeros(2, np.float32))
    with pytest.raises(RuntimeError, match="expected a reader of CreateDB"):
        image_input()


def test_an_error_comes_when_its_batch_is_due(tmp_path: Path) -> None:
    records = [protos(picture(0)), protos(picture(1)), b"no record", protos(picture(3))]
    path = database(tmp_path / "damaged", records)
    assert len(batches(path, 1)) == 1
    with pytest.raises(RuntimeError, match=r"record '002' of the database .*damaged"):
        batches(path, 2)


def test_a_forked_process_makes_a_net_of_its_own(
    numbered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader(numbered)
    net = core.Net("input")
    net.ImageInput("reader", ["data", "label"], **OPTIONS)
    workspace.CreateNet(net)
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    with pytest.raises(RuntimeError, match="was forked; create the net and its reader after"):
        workspace.RunNet(net)
