"""The flags of Caffe2's trainers, with their defaults, and what follows from them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from poseidon.caffe2 import workspace
from poseidon.caffe2.training import STORE, Plan, flags, from_flags, in_job, plan_of
from poseidon.caffe2.workspace.current import current
from poseidon.errors import UsageError

DEFAULTS = """
train_data='x' test_data=None db_type='lmdb' gpus=None num_gpus=1 num_channels=3 image_size=227
num_labels=1000 batch_size=32 epoch_size=1500000 num_epochs=1000 base_learning_rate=0.1
weight_decay=0.0001 cudnn_workspace_limit_mb=64 num_shards=1 shard_id=0 run_id=None
redis_host=None redis_port=6379 file_store_path='/tmp' save_model_name='resnet50_model'
load_model_path=None use_cpu=False model_parallel=False dtype='float' float16_compute=False
enable_tensor_core=False distributed_transport='tcp' distributed_interfaces='' model='resnext'
num_layers=50 resnext_num_groups=1 resnext_width_per_group=64 image_mean_per_channel=None
image_std_per_channel=None test_epoch_size=None use_nccl=False use_ideep=False
first_iter_timeout=1200 timeout=60
"""


def plan(*words: str, **known: int) -> Plan:
    return plan_of(flags().parse_args(["--train_data", "x", *words]), **known)


def test_all_flags_of_caffe2_are_there_with_their_defaults() -> None:
    parsed = vars(flags().parse_args(["--train_data", "x"]))
    assert {f"{name}={value!r}" for name, value in parsed.items()} >= set(DEFAULTS.split())


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
    sizes = ("--shard_batch_sizes=32,32,8", "--epoch_size=720")
    found = plan("--num_shards=3", "--shard_id=2", *sizes, "--num_gpus=2")
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


class FakeGroup:
    """Two workers, of which this is one: `mean` adds what the other has given."""

    def __init__(self, other: Callable[[], Any]) -> None:
        self.given: list[Tensor] = []
        self._other = other

    def mean(self, numbers: Tensor) -> Any:
        self.given.append(numbers)
        return (numbers + self._other()).double() / 2


@pytest.fixture
def workspaces() -> Iterator[None]:
    """A workspace of its own for each shard."""
    yield
    for name in ("shard_1", "default"):
        workspace.SwitchWorkspace(name, True)
        workspace.ResetWorkspace()


def arguments(*words: str) -> argparse.Namespace:
    return flags().parse_args(["--train_data=x", *words])


def shard_plan(shards: int, shard: int) -> Plan:
    return Plan([0], shards, shard, [4] * shards, 1, weighted=False)


def test_one_shard_needs_no_store() -> None:
    assert from_flags(arguments(), shard_plan(1, 0)) is None


def test_shards_need_a_run_id() -> None:
    with pytest.raises(UsageError, match="--run_id is missing"):
        from_flags(arguments(), shard_plan(2, 0))


def test_a_folder(tmp_path: Path, workspaces: None) -> None:
    words = ["--run_id=7", f"--file_store_path={tmp_path}", "--distributed_interfaces=lo,eth0"]
    found = from_flags(arguments(*words), shard_plan(3, 2))
    assert found is not None
    assert (found["num_shards"], found["shard_id"], found["interface"]) == (3, 2, "lo")
    current().get(STORE).value.store.set("key", b"value")
    assert [path.name for path in tmp_path.iterdir()] == ["7"]


def test_workers_of_a_job_meet_in_the_memory_of_the_first(workspaces: None) -> None:
    args = arguments("--distributed_interfaces=127.0.0.1")
    first = FakeGroup(lambda: 0)
    assert in_job(args, shard_plan(2, 0), first)["shard_id"] == 0
    store = current().get(STORE).value.store
    store.set("key", b"value")
    workspace.SwitchWorkspace("shard_1", True)
    found = in_job(args, shard_plan(2, 1), FakeGroup(lambda: first.given[0]))
    assert (found["kv_handler"], found["num_shards"], found["shard_id"]) == (STORE, 2, 1)
    assert current().get(STORE).value.store.find("key") == b"value"
