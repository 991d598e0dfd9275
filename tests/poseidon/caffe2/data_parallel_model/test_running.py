"""Checkpoints of the first device go to all; predictors have plain names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe2 import core, data_parallel_model, model_helper, workspace
from poseidon.caffe2.data_parallel_model import BatchSizesBySpeed, running
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.runtime.workspace import Workspace
from poseidon.caffe2.shards.store_handler import StoreHandler
from poseidon.caffe2.shards.stores import FolderStore
from tests.support import caffe2_replicas as replicas


def test_what_a_checkpoint_holds_goes_to_all_devices() -> None:
    model = replicas.build([1, 2, 3])
    held = data_parallel_model.GetCheckpointParams(model)
    assert all(p in held and p + "_momentum" in held for p in model.GetParams("cpu_1/"))
    assert core.BlobReference("optimizer_iteration") in held
    assert not [name for name in held if str(name).startswith(("cpu_2/", "cpu_3/"))]
    assert "cpu_1/data" not in held
    replicas.feed(model, *replicas.batch(0, 6))
    replicas.start(model)
    for name in ("fc1_w", "fc1_b_momentum"):
        loaded = np.ones_like(workspace.FetchBlob(f"cpu_1/{name}"))
        workspace.FeedBlob(f"cpu_1/{name}", loaded)
        data_parallel_model.FinalizeAfterCheckpoint(model)
        for device in (2, 3):
            np.testing.assert_array_equal(workspace.FetchBlob(f"cpu_{device}/{name}"), loaded)


def test_chosen_blobs_only() -> None:
    model = replicas.build([0, 1])
    replicas.feed(model, *replicas.batch(0, 6))
    replicas.start(model)
    for name in ("fc1_b", "fc2_b"):
        workspace.FeedBlob(f"cpu_0/{name}", np.ones_like(workspace.FetchBlob(f"cpu_0/{name}")))
    data_parallel_model.FinalizeAfterCheckpoint(model, ["cpu_0/fc2_b"], cpu_mode=True)
    assert workspace.FetchBlob("cpu_1/fc2_b").tolist() == [1] * 4
    assert workspace.FetchBlob("cpu_1/fc1_b").tolist() == [0] * 5


def test_learning_rates_of_updates_by_hand() -> None:
    model = replicas.build(
        [0, 1], optimizer_builder_fun=None, param_update_builder_fun=replicas.add_plain_sgd
    )
    assert data_parallel_model.GetLearningRateBlobNames(model) == ["cpu_0/lr", "cpu_1/lr"]


def test_a_predictor_has_plain_names() -> None:
    model = replicas.build([0, 1])
    replicas.train(model, 1, 8)
    test = model_helper.ModelHelper(name="test", init_params=False)
    data_parallel_model.Parallelize_CPU(
        test, lambda model: None, replicas.add_layers, devices=[0, 1]
    )
    net, params = data_parallel_model.ExtractPredictorNet(
        test, ["data", "label"], ["softmax"], core.DeviceOption(caffe2_pb2.CPU)
    )
    assert sorted(params) == ["cpu_0/fc1_b", "cpu_0/fc1_w", "cpu_0/fc2_b", "cpu_0/fc2_w"]
    data, labels = replicas.batch(3, 4)
    workspace.FeedBlob("data", data)
    workspace.FeedBlob("label", labels)
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob("softmax").shape == (4, replicas.CLASSES)


@pytest.mark.parametrize(
    ("total", "speeds", "multiple", "expected"),
    [
        (96, [1, 1, 1], 1, [32, 32, 32]),
        (144, [160, 160, 40], 1, [64, 64, 16]),
        (10, [1, 1, 1], 1, [4, 3, 3]),
        (12, [100, 1, 1], 1, [10, 1, 1]),
        (12, [1, 1, 100], 4, [4, 4, 4]),
        (24, [1, 1, 100], 4, [4, 4, 16]),
        (7, [0.5], 1, [7]),
    ],
)
def test_batches_follow_speeds(
    total: int, speeds: list[float], multiple: int, expected: list[int]
) -> None:
    assert BatchSizesBySpeed(total, speeds, multiple) == expected


@pytest.mark.parametrize(
    ("total", "speeds", "multiple", "reason"),
    [
        (8, [1.0, 0.0], 1, "expected a number above 0 for each shard"),
        (8, [1.0, float("nan")], 1, "expected a number above 0 for each shard"),
        (8, [], 1, "expected a number above 0 for each shard"),
        (9, [1.0, 1.0], 2, "expected a multiple of 2, 4 or more"),
        (2, [1.0, 1.0, 1.0], 1, "expected a multiple of 1, 3 or more"),
    ],
)
def test_what_cannot_be_shared(total: int, speeds: list[float], multiple: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        BatchSizesBySpeed(total, speeds, multiple)


def test_shards_learn_each_others_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Workspace()
    for shard in range(3):
        own.create(f"store_{shard}").value = StoreHandler(FolderStore(tmp_path, "run"), "run")
    monkeypatch.setattr(running, "current", lambda: own)

    def call(shard: int) -> list[list[float]]:
        rendezvous = {"kv_handler": f"store_{shard}", "num_shards": 3, "shard_id": shard}
        rendezvous["engine"] = "GLOO"
        return [
            data_parallel_model.ExchangeValue(rendezvous, "speed", shard / 4 + add, 30)
            for add in (0, 1)
        ]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(call, range(3))) == [[[0.0, 0.25, 0.5], [1.0, 1.25, 1.5]]] * 3


def test_one_shard_knows_its_own_number() -> None:
    assert data_parallel_model.ExchangeValue(None, "speed", 2.5) == [2.5]
