"""The store of the trainer's shards: by flags, and in a job of the launcher."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from poseidon.caffe2 import workspace
from poseidon.caffe2.training.flags import Plan, flags
from poseidon.caffe2.training.rendezvous import STORE, from_flags, in_job
from poseidon.caffe2.workspace.current import current
from poseidon.errors import UsageError


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


def plan(shards: int, shard: int) -> Plan:
    return Plan([0], shards, shard, [4] * shards, 1, weighted=False)


def test_one_shard_needs_no_store() -> None:
    assert from_flags(arguments(), plan(1, 0)) is None


def test_shards_need_a_run_id() -> None:
    with pytest.raises(UsageError, match="--run_id is missing"):
        from_flags(arguments(), plan(2, 0))


def test_a_folder(tmp_path: Path, workspaces: None) -> None:
    words = ["--run_id=7", f"--file_store_path={tmp_path}", "--distributed_interfaces=lo,eth0"]
    found = from_flags(arguments(*words), plan(3, 2))
    assert found is not None
    assert (found["num_shards"], found["shard_id"], found["interface"]) == (3, 2, "lo")
    current().get(STORE).value.store.set("key", b"value")
    assert [path.name for path in tmp_path.iterdir()] == ["7"]


def test_workers_of_a_job_meet_in_the_memory_of_the_first(workspaces: None) -> None:
    args = arguments("--distributed_interfaces=127.0.0.1")
    first = FakeGroup(lambda: 0)
    assert in_job(args, plan(2, 0), first)["shard_id"] == 0
    store = current().get(STORE).value.store
    store.set("key", b"value")
    workspace.SwitchWorkspace("shard_1", True)
    found = in_job(args, plan(2, 1), FakeGroup(lambda: first.given[0]))
    assert (found["kv_handler"], found["num_shards"], found["shard_id"]) == (STORE, 2, 1)
    assert current().get(STORE).value.store.find("key") == b"value"
