"""Replicas compute what one device computes with the whole batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from poseidon.caffe2 import brew, core, data_parallel_model, model_helper, rnn_cell, workspace
from poseidon.caffe2.data_parallel_model import replicas
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.runtime import bind
from poseidon.caffe2.shards.common_world import local_sum
from tests.support.caffe2_replicas import (
    add_layers,
    batch,
    build,
    feed,
    first_params,
    params,
    start,
    train,
)


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine has no GPU, so that GPUs stand for parts of the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bind._gpu_count.cache_clear()
    yield
    bind._gpu_count.cache_clear()


def trained(
    devices: list[int], first: Mapping[str, np.ndarray] | None = None, **arguments: Any
) -> dict[str, np.ndarray]:
    workspace.ResetWorkspace()
    model = build(devices, **arguments)
    train(model, 10, 32, first)
    own = params(model)
    for device in model._devices[1:]:
        if not arguments.get("shared_model"):
            for name, value in params(model, device).items():
                np.testing.assert_array_equal(value, own[name])
    return own


def assert_equal(
    one: dict[str, np.ndarray], other: dict[str, np.ndarray], tolerance: float = 1e-5
) -> None:
    assert list(one) == list(other) and one
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize(
    ("devices", "arguments"),
    [
        ([5, 2, 3, 7], {"net_type": "simple"}),
        ([0, 1], {"cpu_device": False, "ideep": True}),
    ],
)
def test_replicas_with_parts_of_a_batch_equal_one_with_all(
    devices: list[int], arguments: dict[str, Any]
) -> None:
    assert_equal(trained([0]), trained(devices, **arguments))


@pytest.mark.needs("gpu")
@pytest.mark.parametrize("use_nccl", [False, True])
def test_replicas_on_gpus_equal_one_on_the_cpu(use_nccl: bool) -> None:
    gpus = list(range(workspace.NumGpuDevices()))[: 32 // 4]
    devices = gpus[: 1 << (len(gpus).bit_length() - 1)]  # 1, 2, 4 or 8, which divide the batch
    first = first_params()
    on_gpus = trained(devices, first, cpu_device=False, use_nccl=use_nccl)
    assert_equal(trained([0], first), on_gpus, 1e-4)


def test_only_gpus_that_cannot_read_each_other_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "NumGpuDevices", lambda: 2)
    for apart in (False, True):
        pattern = np.eye(2, dtype=bool) | (not apart)
        monkeypatch.setattr(workspace, "GetGpuPeerAccessPattern", lambda pattern=pattern: pattern)
        model = build([0, 1, 2], cpu_device=False)  # of a machine with more GPUs than this one
        copies = {op.output[0] for op in model.net.Proto().op if op.output[0].endswith("_copy")}
        names = ("fc1_w", "fc1_b", "fc2_w", "fc2_b")
        assert copies == ({f"gpu_0/{name}_grad_gpu1_copy" for name in names} if apart else set())


def test_a_sum_is_in_the_order_of_devices_on_the_cpu_and_of_hosts_between_them() -> None:
    """So its bits depend on how devices are divided among hosts."""
    model = build([0, 1, 2, 3])
    (sum_of_devices,) = (
        op
        for op in model.net.Proto().op
        if op.type == "Sum" and op.output[0].endswith("fc1_b_grad")
    )
    gradients = [np.array([value], np.float32) for value in (1e8, 1, -1e8, 1)]
    for device, gradient in enumerate(gradients):
        workspace.FeedBlob(f"cpu_{device}/fc1_b_grad", gradient)
    workspace.RunOperatorOnce(sum_of_devices)
    assert workspace.FetchBlob("cpu_0/fc1_b_grad").tolist() == [1.0]
    first, second = (
        local_sum([torch.from_numpy(part) for part in gradients[start : start + 2]])
        for start in (0, 2)
    )
    assert (first + second).tolist() == [0.0]


def test_a_machine_without_gpus_uses_the_cpu_with_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "NumGpuDevices", lambda: 0)
    monkeypatch.setattr(replicas, "_warned", set())
    with caplog.at_level(logging.WARNING, "data_parallel_model"):
        for _ in range(2):
            model = build([0, 1], cpu_device=False)
    assert [record.message for record in caplog.records] == [
        "This machine has no GPU: data_parallel_model's replicas run on the CPU"
    ]
    assert (model._device_prefix, model._device_type) == ("gpu", caffe2_pb2.CPU)
    assert data_parallel_model.GetLearningRateBlobNames(model) == ["SgdOptimizer_0_lr_cpu"]


def test_devices_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.cpu_count", lambda: 3)
    assert build(None)._devices == [0, 1, 2]  # type: ignore[arg-type]
    monkeypatch.setattr(workspace, "NumGpuDevices", lambda: 0)
    assert build(None, cpu_device=False)._devices == [0]  # type: ignore[arg-type]


def test_recurrent_networks_on_replicas_equal_one_with_the_whole_batch() -> None:
    def add_recurrent(model: Any, loss_scale: float) -> list[Any]:
        rows = 8 // count
        for kind in ("hidden", "cell"):
            model.param_init_net.ConstantFill([], f"{kind}_init", value=0.0, shape=[1, rows, 4])
        model.net.ExpandDims("data", "sequence", dims=[0])
        lengths = model.net.ConstantFill(
            [], "lengths", shape=[rows], value=1, dtype=core.DataType.INT32
        )
        states = ("hidden_init", "cell_init")
        output, *_ = rnn_cell.LSTM(model, "sequence", lengths, states, 6, 4, "lstm")
        _, loss = model.net.SoftmaxWithLoss(
            [model.net.Squeeze(output, "flat", dims=[0]), "label"], ["p", "loss"]
        )
        return [model.net.Scale(loss, scale=loss_scale)]

    ends = []
    for count in (1, 4):
        workspace.ResetWorkspace()
        model = build(list(range(count)), forward_pass_builder_fun=add_recurrent)
        train(model, 3, 8)
        ends.append(params(model))
    assert_equal(*ends)


def test_builders_of_updates_exclude_each_other() -> None:
    with pytest.raises(AssertionError, match="Can only specify one"):
        build([0], param_update_builder_fun=lambda model: None)


@pytest.mark.parametrize("devices", [[], [0, 0], [-1], ["a"]])
def test_devices_are_different_numbers(devices: list[Any]) -> None:
    with pytest.raises(
        AssertionError, match="expected at least one number, each once and from 0 on"
    ):
        build(devices)


def test_one_number_is_no_list_of_devices() -> None:
    with pytest.raises(AssertionError, match=r"^devices=2: expected a list of numbers"):
        data_parallel_model.Parallelize_CPU(model_helper.ModelHelper(), None, None, devices=2)


def test_a_rendezvous_without_an_entry_is_named() -> None:
    with pytest.raises(ValueError, match="has no num_shards: expected kv_handler, shard_id"):
        rendezvous = {"kv_handler": "store", "shard_id": 0, "engine": "GLOO"}
        data_parallel_model.Parallelize_CPU(
            model_helper.ModelHelper(name="m"), None, None, devices=[0], rendezvous=rendezvous
        )


@pytest.mark.parametrize(
    "function",
    [
        data_parallel_model.RunInitNet,
        data_parallel_model.CreateNet,
        data_parallel_model.GetCheckpointParams,
        data_parallel_model.FinalizeAfterCheckpoint,
    ],
)
def test_a_model_that_is_not_parallelized_is_named(function: Any) -> None:
    with pytest.raises(AssertionError, match=r"^Model alone\S* is not parallelized"):
        function(model_helper.ModelHelper(name="alone"))


def test_losses_are_a_list() -> None:
    with pytest.raises(AssertionError, match="must return list of loss blobs"):
        build([0], forward_pass_builder_fun=lambda model, scale: add_layers(model, scale)[0])


def test_a_device_scope_around_it_is_refused() -> None:
    with (
        core.DeviceScope(core.DeviceOption(caffe2_pb2.CUDA, 0)),
        pytest.raises(AssertionError, match="without device-scope"),
    ):
        data_parallel_model.Parallelize_GPU(None, None, None)


def test_net_transformers_are_called_once_with_their_arguments() -> None:
    calls: list[Any] = []
    model = build(
        [0, 1],
        pre_grad_net_transformer_fun=lambda model: calls.append(len(model.net.Proto().op)),
        net_transformer_fun=lambda model, *rest: calls.append(rest),
    )
    forward = len([op for op in model.net.Proto().op if "data" in str(op.input)])
    assert forward and calls == [10, (2, "cpu", caffe2_pb2.CPU)]


def test_what_follows_the_first_copies_is_built_for_each_device() -> None:
    model = build(
        [0, 1], post_sync_builder_fun=lambda model: model.param_init_net.Copy("fc1_w", "fc1_w_kept")
    )
    feed(model, *batch(0, 8))
    start(model)
    kept = [workspace.FetchBlob(f"cpu_{device}/fc1_w_kept") for device in (0, 1)]
    np.testing.assert_array_equal(kept[0], kept[1])


@pytest.mark.parametrize("sizes", [[4], [4, 0], [1, 2, 3]])
def test_each_shard_has_a_batch_size(sizes: list[int]) -> None:
    rendezvous = {"kv_handler": "store", "num_shards": 2, "shard_id": 0, "engine": "GLOO"}
    with pytest.raises(ValueError, match=r"expected 2 numbers above 0"):
        build([0], rendezvous=rendezvous, shard_batch_sizes=sizes)


def test_a_loss_counts_by_the_batch_of_its_shard() -> None:
    scales: list[float] = []

    def note(model: Any, loss_scale: float) -> list[Any]:
        scales.append(loss_scale)
        return add_layers(model, loss_scale)

    rendezvous = {"kv_handler": "store", "num_shards": 3, "shard_id": 2, "engine": "GLOO"}
    build(
        [0, 1], rendezvous=rendezvous, forward_pass_builder_fun=note, shard_batch_sizes=[64, 64, 16]
    )
    assert scales == [16 / 144 / 2] * 2


@pytest.mark.parametrize(("engine", "worlds"), [("GLOO", 4), ("NCCL", 1)])
def test_sums_between_hosts_begin_with_the_last_layer(engine: str, worlds: int) -> None:
    rendezvous = {"kv_handler": "store", "num_shards": 2, "shard_id": 1, "engine": engine}
    model = build([0, 1], rendezvous=rendezvous)
    sums = [op for op in model.net.Proto().op if op.type == "Allreduce"]
    assert [op.name for op in sums] == ["fc2_b_grad", "fc2_w_grad", "fc1_b_grad", "fc1_w_grad"]
    assert len({op.input[0] for op in sums}) == worlds
    assert [list(op.control_input) for op in sums[1:]] == [
        [] if engine == "GLOO" else [before.output[0]] for before in sums[:-1]
    ]


def test_a_blob_is_copied_to_all_devices_in_each_run() -> None:
    def add_number(model: Any) -> None:
        model.param_init_net.ConstantFill([], ["number"], shape=[1], value=1.0)

    model = build([0, 1, 2], input_builder_fun=add_number)
    data_parallel_model.AddBlobSync(model, ["number"])
    feed(model, *batch(0, 6))
    start(model)
    workspace.FeedBlob("cpu_0/number", np.array([2603.0], np.float32))
    data_parallel_model.RunNet(model, 1)
    assert [workspace.FetchBlob(f"cpu_{d}/number").tolist() for d in range(3)] == [[2603.0]] * 3
    with pytest.raises(AssertionError, match="Provide unprefixed blob name: cpu_0/number"):
        data_parallel_model.AddBlobSync(model, ["cpu_0/number"])


@pytest.mark.usefixtures("no_gpus")
def test_another_model_is_appended_for_each_device() -> None:
    other = model_helper.ModelHelper(name="other")
    brew.fc(other, "data", "other_fc", 6, 4)

    def add_both(model: Any, loss_scale: float) -> list[Any]:
        model.net.AppendNet(data_parallel_model.ConvertNetForDevice(other.net))
        model.param_init_net.AppendNet(
            data_parallel_model.ConvertNetForDevice(other.param_init_net)
        )
        return add_layers(model, loss_scale)

    for arguments in ({}, {"cpu_device": False}):
        workspace.ResetWorkspace()
        model = build([0, 1], forward_pass_builder_fun=add_both, **arguments)
        feed(model, *batch(0, 8))
        start(model)
        data_parallel_model.RunNet(model, 1)
        assert workspace.FetchBlob(f"{model._device_prefix}_1/other_fc").shape == (4, 4)


def test_sparse_gradients_of_a_host_are_joined() -> None:
    def add_embedding(model: Any, loss_scale: float) -> list[Any]:
        table = model.param_init_net.UniformFill([], "table", shape=[8, 4])
        model.AddParameter(table)
        rows = model.net.Gather([table, "data"], "rows")
        _, loss = model.net.SoftmaxWithLoss([rows, "label"], ["softmax", "loss"])
        return [model.net.Scale(loss, scale=loss_scale)]

    model = build(
        [0, 1], forward_pass_builder_fun=add_embedding, optimizer_builder_fun=lambda model: None
    )
    feed(model, np.array([1, 2, 3, 1], np.int64), np.array([0, 1, 2, 3], np.int32))
    data_parallel_model.RunInitNet(model)
    data_parallel_model.RunNet(model, 1)
    grad = model.param_to_grad["cpu_1/table"]
    assert workspace.FetchBlob(str(grad.indices)).tolist() == [1, 2, 3, 1]
    assert workspace.FetchBlob(str(grad.values)).shape == (4, 4)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (3, [(0, 1, 2)]),
        (4, [(0, 1), (2, 3), (0, 2)]),
        (8, [(0, 1), (2, 3), (4, 5), (6, 7), (0, 2), (4, 6), (0, 4)]),
    ],
)
def test_gpus_sum_as_a_tree(count: int, expected: list[tuple[int, ...]]) -> None:
    from poseidon.caffe2.data_parallel_model.collectives import _tree

    assert _tree(count) == expected
