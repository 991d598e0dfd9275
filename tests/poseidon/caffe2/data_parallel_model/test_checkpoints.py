"""Checkpoints of the first device go to all; predictors have plain names."""

from __future__ import annotations

import numpy as np

from poseidon.caffe2 import core, data_parallel_model, model_helper, workspace
from poseidon.caffe2.proto import caffe2_pb2
from tests.support import caffe2_replicas as replicas


def test_what_a_checkpoint_holds_goes_to_all_devices() -> None:
    workspace.ResetWorkspace()
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
    workspace.ResetWorkspace()
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
    workspace.ResetWorkspace()
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
