"""Batch sizes by speed, and numbers that shards exchange."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from poseidon.caffe2 import data_parallel_model
from poseidon.caffe2.data_parallel_model import BatchSizesBySpeed, unequal
from poseidon.caffe2.runtime.workspace import Workspace
from poseidon.caffe2.shards.store_handler import StoreHandler
from poseidon.caffe2.shards.stores import FolderStore


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
    monkeypatch.setattr(unequal, "current", lambda: own)

    def call(shard: int) -> list[list[float]]:
        rendezvous = {
            "kv_handler": f"store_{shard}",
            "num_shards": 3,
            "shard_id": shard,
            "engine": "GLOO",
        }
        return [
            data_parallel_model.ExchangeValue(rendezvous, "speed", shard / 4 + add, 30)
            for add in (0, 1)
        ]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(call, range(3))) == [[[0.0, 0.25, 0.5], [1.0, 1.25, 1.5]]] * 3


def test_one_shard_knows_its_own_number() -> None:
    assert data_parallel_model.ExchangeValue(None, "speed", 2.5) == [2.5]
