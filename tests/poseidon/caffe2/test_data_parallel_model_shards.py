"""Shards in processes of their own train as one process does; each way to fail is a sentence."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import brew, optimizer, workspace
from tests.support import caffe2_replicas as replicas
from tests.support.caffe2_shards import Run, folder, train
from tests.support.redis_server import redis_server

pytestmark = pytest.mark.processes


def alone(run: Run) -> dict[str, np.ndarray]:
    """Return the parameters that one process gets with the whole batch."""
    workspace.ResetWorkspace()
    given = {k: v for k, v in run.parallelize.items() if k == "optimizer_builder_fun"}
    model = replicas.build([0], forward_pass_builder_fun=run.layers, **given)
    replicas.train(model, run.iterations, sum(run.sizes))
    return replicas.params(model)


def assert_near(one: dict[str, np.ndarray], other: dict[str, np.ndarray], tolerance: float) -> None:
    assert list(one) == list(other) and one
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=0, atol=tolerance, err_msg=name)


def assert_all_equal(results: list[Any]) -> dict[str, np.ndarray]:
    """Return the parameters that all devices of all shards have, to the bit."""
    assert all(isinstance(result, list) for result in results), results
    first = results[0][0]
    for result in results:
        for params in result:
            assert_near(params, first, 0.0)
    return first


def test_three_shards_through_a_folder_equal_one_process_and_each_run_the_other(
    tmp_path: Path,
) -> None:
    run = Run(store=folder(tmp_path), sizes=(8, 8, 8), devices=(0, 1))
    first = assert_all_equal(train(run))
    assert_near(first, alone(run), 1e-5)
    again = assert_all_equal(train(replace(run, store=folder(tmp_path, "again"))))
    assert_near(first, again, 0.0)


@pytest.mark.needs("redis")
def test_three_shards_through_redis_equal_one_process(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        store = (
            "RedisStoreHandlerCreate",
            {"host": "127.0.0.1", "port": server.port, "prefix": "run"},
        )
        run = Run(store=store, sizes=(8, 8, 8), parallelize={"net_type": "simple"})
        assert_near(assert_all_equal(train(run)), alone(run), 1e-5)
        for sentence in train(replace(run, sizes=(8,) * 2), shards=[1]):
            assert sentence.startswith("run id 'run' was used before: shard 1 was process ")


def test_unequal_batches_are_weighted(tmp_path: Path) -> None:
    run = Run(store=folder(tmp_path), sizes=(16, 6, 2), weighted=True)
    weighted = assert_all_equal(train(run))
    assert_near(weighted, alone(run), 1e-5)
    plain = assert_all_equal(train(replace(run, store=folder(tmp_path, "plain"), weighted=False)))
    assert max(np.abs(plain[name] - value).max() for name, value in weighted.items()) > 1e-3


def add_tables(model: Any, loss_scale: float) -> list[Any]:
    """Two tables of rows with one set of indices."""
    model.net.ArgMax("data", "indices", axis=1, keepdims=False)
    for name in ("one", "other"):
        table = model.param_init_net.XavierFill([], name, shape=[replicas.FEATURES, 5])
        model.AddParameter(table)
        model.net.Gather([table, "indices"], f"rows_of_{name}")
    model.net.Mul(["rows_of_one", "rows_of_other"], "rows")
    brew.fc(model, "rows", "fc", dim_in=5, dim_out=replicas.CLASSES)
    _, loss = model.net.SoftmaxWithLoss(["fc", "label"], ["softmax", "loss"])
    return [model.net.Scale(loss, scale=loss_scale)]


def add_adagrad(model: Any) -> Any:
    return optimizer.build_adagrad(model, 0.1)


def test_rows_of_sparse_gradients_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    run = Run(
        store=folder(tmp_path),
        sizes=(16, 6, 2),
        devices=(0, 1),
        weighted=True,
        layers=add_tables,
        parallelize={"optimizer_builder_fun": add_adagrad},
    )
    assert_near(assert_all_equal(train(run)), alone(run), 1e-5)


def test_shards_whose_devices_share_parameters(tmp_path: Path) -> None:
    store = folder(tmp_path)
    run = Run(
        store=store, sizes=(8, 8), devices=(0, 1), iterations=5, parallelize={"shared_model": True}
    )
    (first, no_other), (second, _) = train(run)
    assert no_other == {}
    assert_near(first, second, 0.0)
    assert_near(first, alone(run), 1e-5)


def test_blocks_of_iterations_between_shards(tmp_path: Path) -> None:
    run = Run(store=folder(tmp_path), sizes=(8, 8), devices=(0, 1), iterations=3, bmuf=True)
    blocks = assert_all_equal(train(run))
    workspace.ResetWorkspace()
    model = replicas.build_bmuf([0, 1, 2, 3])
    replicas.feed(model, *replicas.batch(0, 16))
    replicas.start(model)
    for step in range(3):
        replicas.feed(model, *replicas.batch(step, 16))
        replicas.run(model, 2)
    assert_near(blocks, replicas.params(model), 1e-5)


def test_a_shard_that_dies_ends_the_others_with_a_sentence_that_names_it(tmp_path: Path) -> None:
    first, second, died = train(Run(store=folder(tmp_path), sizes=(8, 8, 8), iterations=3, dies=2))
    assert died is None
    for rank, sentence in enumerate((first, second)):
        assert re.match(rf"shard {rank} (could not|cannot) ", sentence) and "\n" not in sentence
        assert "; shard 2 (process " in sentence
        assert sentence.endswith(" ended, or cannot be reached") and " and shard" not in sentence


def add_normalized(model: Any, loss_scale: float) -> list[Any]:
    brew.fc(model, "data", "fc0", dim_in=replicas.FEATURES, dim_out=replicas.FEATURES)
    model.net.Reshape("fc0", ["images", "_shape"], shape=[-1, replicas.FEATURES, 1, 1])
    brew.spatial_bn(model, "images", "normal", replicas.FEATURES, momentum=0.5, is_test=False)
    brew.fc(model, "normal", "fc1", dim_in=replicas.FEATURES, dim_out=replicas.CLASSES)
    _, loss = model.net.SoftmaxWithLoss(["fc1", "label"], ["softmax", "loss"])
    return [model.net.Scale(loss, scale=loss_scale)]


def test_parameters_stay_equal_with_a_normalization_that_each_shard_has_for_itself(
    tmp_path: Path,
) -> None:
    assert_all_equal(
        train(Run(store=folder(tmp_path), sizes=(8, 8), iterations=3, layers=add_normalized))
    )
