"""The flags of Caffe2's trainers, with their defaults, and what follows from them."""

from __future__ import annotations

from typing import Any

import pytest

from poseidon.caffe2.training.flags import Plan, flags, plan_of
from poseidon.errors import UsageError

DEFAULTS: dict[str, Any] = {
    "train_data": "x",
    "test_data": None,
    "db_type": "lmdb",
    "gpus": None,
    "num_gpus": 1,
    "num_channels": 3,
    "image_size": 227,
    "num_labels": 1000,
    "batch_size": 32,
    "epoch_size": 1500000,
    "num_epochs": 1000,
    "base_learning_rate": 0.1,
    "weight_decay": 1e-4,
    "cudnn_workspace_limit_mb": 64,
    "num_shards": 1,
    "shard_id": 0,
    "run_id": None,
    "redis_host": None,
    "redis_port": 6379,
    "file_store_path": "/tmp",
    "save_model_name": "resnet50_model",
    "load_model_path": None,
    "use_cpu": False,
    "model_parallel": False,
    "dtype": "float",
    "float16_compute": False,
    "enable_tensor_core": False,
    "distributed_transport": "tcp",
    "distributed_interfaces": "",
    "model": "resnext",
    "num_layers": 50,
    "resnext_num_groups": 1,
    "resnext_width_per_group": 64,
    "image_mean_per_channel": None,
    "image_std_per_channel": None,
    "test_epoch_size": None,
    "use_nccl": False,
    "use_ideep": False,
    "first_iter_timeout": 1200,
    "timeout": 60,
}


def plan(*words: str, **known: int) -> Plan:
    return plan_of(flags().parse_args(["--train_data", "x", *words]), **known)


def test_all_flags_of_caffe2_are_there_with_their_defaults() -> None:
    parsed = vars(flags().parse_args(["--train_data", "x"]))
    assert {name: parsed[name] for name in DEFAULTS} == DEFAULTS


def test_train_data_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        flags().parse_args([])
    assert "--train_data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], False),
        (["--use_cpu"], True),
        (["--use_cpu", "True"], True),
        (["--use_cpu=false"], False),
    ],
)
def test_switches_are_those_of_all_versions(words: list[str], value: bool) -> None:
    assert flags().parse_args(["--train_data", "x", *words]).use_cpu is value


def test_the_first_command_of_three_servers() -> None:
    words = "--gpus 0 --num_labels 2 --base_learning_rate 0.0384 --batch_size 32 --epoch_size 1280 --num_epochs 10"
    found = plan(
        *words.split(),
        *["--num_shards", "3", "--shard_id", "1", "--run_id", "1234", "--file_store_path=/mnt/"],
    )
    assert found == Plan([0], 3, 1, [32, 32, 32], 13, weighted=False)
    assert (found.batch_size, found.epoch_size) == (32, 1248)


def test_shards_of_unequal_batches() -> None:
    found = plan(
        "--num_shards=3",
        "--shard_id=2",
        "--shard_batch_sizes=32,32,8",
        "--epoch_size=720",
        "--num_gpus=2",
    )
    assert found == Plan([0, 1], 3, 2, [32, 32, 8], 10, weighted=True)
    assert found.batch_size == 8
    assert not plan("--num_shards=2", "--shard_batch_sizes=8,8", "--epoch_size=32").weighted


def test_a_launcher_gives_the_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan("--epoch_size=400", workers=3, rank=2)
    assert (found.shards, found.shard, found.epoch_iters) == (3, 2, 4)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    found = plan("--num_shards=9")
    assert (found.shards, found.shard) == (4, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch_size=0"], "--batch_size=0: expected a whole number above 0"),
        (["--num_shards=0"], "--num_shards=0: expected a whole number above 0"),
        (["--num_labels=0"], "--num_labels=0: expected a whole number above 0"),
        (["--image_size=-3"], "--image_size=-3: expected a whole number above 0"),
        (["--resnext_num_groups=0"], "--resnext_num_groups=0: expected a whole number above 0"),
        (["--timeout=0"], "--timeout=0: expected a whole number above 0"),
        (["--num_gpus=0"], "--num_gpus=0: expected a whole number above 0"),
        (["--gpus=0,0"], "--gpus=0,0: expected each GPU once"),
        (["--redis_port=99999"], "--redis_port=99999: expected a port, 1 to 65535"),
        (["--seed=99999999999999999999"], "expected a number of 64 bits"),
    ],
)
def test_a_wrong_value_is_named_with_its_flag(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*words)
