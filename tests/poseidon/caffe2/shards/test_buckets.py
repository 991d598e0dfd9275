"""Collectives that are under way: which sums share a message, and what their results are."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from poseidon.caffe2.shards import buckets
from poseidon.caffe2.shards.buckets import Buckets, DevicesOfProcess
from poseidon.caffe2.shards.common_world import CommonWorld
from poseidon.caffe2.shards.store_handler import CollectiveError, StoreHandler
from poseidon.caffe2.shards.stores import FolderStore
from tests.support.simulated_device import SimulatedDevice, simulated_devices

LIMIT_S = 30.0


class World:
    """A world of two equal shards that notes the sizes of its messages; one of 13 values fails."""

    size = 2

    def __init__(self, shards: int = 0) -> None:
        self.shards = shards
        self.sent: list[int] = []

    def joins(self, other: World) -> bool:
        return self.shards == other.shards

    def start_all_reduce(
        self, tensors: list[torch.Tensor], owned: bool = False
    ) -> Callable[[], list[torch.Tensor]]:
        assert not owned
        self.sent.append(tensors[0].numel())
        total = 2 * sum(tensors)

        def finish() -> list[torch.Tensor]:
            if tensors[0].numel() == 13:
                raise CollectiveError("shard 1 ended")
            return [total.clone() for _ in tensors]

        return finish


def pack(world: World, *tensors: torch.Tensor) -> list[Any]:
    open_ = Buckets()
    return [open_, *(open_.all_reduce(cast(CommonWorld, world), [tensor]) for tensor in tensors)]


def test_small_sums_share_a_message_and_large_ones_have_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 40)
    world = World()
    sizes = (3, 20, 4, 2, 3, 9, 10, 1)
    open_, *pending = pack(world, *(torch.full((size,), float(size)) for size in sizes))
    assert world.sent == [20, 9, 3, 10]
    assert [one.started for one in pending] == [True] * 5 + [False, True, False]
    open_.flush()
    assert world.sent == [20, 9, 3, 10, 10]
    assert [one.wait()[0].tolist() for one in pending] == [[2.0 * size] * size for size in sizes]


def test_types_and_shards_do_not_mix_but_shapes_and_worlds_do() -> None:
    first, second, other = World(), World(), World(shards=1)
    open_ = Buckets()
    tensors = [torch.ones(2, 3), torch.ones(1), torch.ones(4), torch.ones(5, dtype=torch.int64)]
    worlds = [first, second, other, first]
    pending = [
        open_.all_reduce(cast(CommonWorld, w), [t]) for w, t in zip(worlds, tensors, strict=True)
    ]
    open_.flush()
    assert (first.sent, second.sent, other.sent) == ([7, 5], [], [4])
    for one, tensor in zip(pending, tensors, strict=True):
        assert torch.equal(one.wait()[0], 2 * tensor)


def test_large_sums_go_through_the_first_world_of_their_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    first, second, other = World(), World(), World(shards=1)
    open_ = Buckets()
    for size, world in enumerate((first, second, other, second), start=1):
        open_.all_reduce(cast(CommonWorld, world), [torch.ones(size)])
    assert (first.sent, second.sent, other.sent) == ([1, 2, 4], [], [3])


def test_a_tensor_may_change_behind_the_call() -> None:
    tensor = torch.ones(2)
    open_, first, second = pack(World(), tensor, torch.ones(1))
    tensor.zero_()
    open_.flush()
    assert (first.wait()[0].tolist(), second.wait()[0].tolist()) == ([2, 2], [2])


def test_a_failure_is_that_of_each_sum_of_the_message() -> None:
    open_, *pending = pack(World(), torch.ones(6), torch.ones(7))
    open_.flush()
    for one in pending:
        with pytest.raises(CollectiveError, match=r"^shard 1 ended$"):
            one.wait()


def on_shards(folder: Path, shards: int, call: Callable[[CommonWorld], Any]) -> list[Any]:
    def run(rank: int) -> Any:
        handler = StoreHandler(FolderStore(folder, "run"), "run")
        return call(CommonWorld(handler, "world", rank=rank, size=shards, timeout_s=LIMIT_S))

    with ThreadPoolExecutor(shards) as pool:
        return list(pool.map(run, range(shards)))


def test_two_shards_have_the_bits_of_single_messages(tmp_path: Path) -> None:
    def call(world: CommonWorld) -> bool:
        generator = torch.Generator().manual_seed(world.rank)
        tensors = [torch.randn(997 * n + 1, generator=generator) for n in range(6)]
        alone = [world.all_reduce([tensor])[0] for tensor in tensors]
        open_ = Buckets()
        pending = [open_.all_reduce(world, [tensor]) for tensor in tensors]
        open_.flush()
        in_place = world.start_all_reduce([tensors[5]], owned=True)()
        assert in_place[0] is tensors[5] and torch.equal(in_place[0], alone[5])
        return all(
            torch.equal(one.wait()[0], other) for one, other in zip(pending, alone, strict=True)
        )

    assert on_shards(tmp_path, 2, call) == [True, True]


def test_three_shards_agree_on_sums_over_their_devices_copies_and_barriers(tmp_path: Path) -> None:
    def call(world: CommonWorld) -> list[Any]:
        own = torch.full((2, 2), world.rank + 1.0)
        open_ = Buckets()
        pending = [
            open_.all_reduce(world, [own, own.clone()]),
            open_.broadcast(world, [own], 1),
            open_.all_reduce(world, [torch.full((3,), world.rank, dtype=torch.int16)]),
            open_.barrier(world),
        ]
        open_.flush()
        return [[value[0].tolist() for value in one.wait()] for one in pending[:2]] + [
            pending[2].wait()[0].tolist()
        ]

    assert on_shards(tmp_path, 3, call) == [[[[12, 12], [12, 12]], [[2, 2]], [3, 3, 3]]] * 3


def put_on(devices: list[SimulatedDevice], *sizes: int) -> list[list[torch.Tensor]]:
    """Return tensors of these sizes on each device, full of its number + 1 and of their size."""
    return [
        [
            device.put(torch.full((size,), 10.0 * number + size))
            for number, device in enumerate(devices)
        ]
        for size in sizes
    ]


def test_sums_over_gpus_share_a_call_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in takes the place of NCCL, which needs two GPUs."""
    calls: list[int] = []

    def all_reduce(parts: list[torch.Tensor], sums: list[torch.Tensor]) -> None:
        calls.append(parts[0].numel())
        for device in devices:
            device.synchronize()
        total = torch.stack([part.cpu() for part in parts]).sum(0)
        for whole in sums:
            whole.copy_(total)

    monkeypatch.setattr(buckets.nccl, "all_reduce", all_reduce)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 40)
    with simulated_devices(2, 5) as devices:
        groups = put_on(devices, 3, 4, 20, 5)
        open_ = Buckets()
        pending = [open_.all_reduce(DevicesOfProcess(group), group) for group in groups]
        open_.flush()
        assert calls == [20, 7, 5]
        for one, group in zip(pending, groups, strict=True):
            results = one.wait()
            assert [result.device for result in results] == [device.torch for device in devices]
            size = len(group[0])
            assert [result.cpu().tolist() for result in results] == [[10.0 + 2 * size] * size] * 2


def test_copies_to_gpus_share_a_copy() -> None:
    with simulated_devices(2, 0) as devices:
        groups = put_on(devices, 3, 4)
        open_ = Buckets()
        pending = [open_.all_reduce(DevicesOfProcess(group, 1), group) for group in groups]
        assert not any(one.started for one in pending)
        open_.flush()
        assert [[result.cpu().tolist() for result in one.wait()] for one in pending] == [
            [[13.0] * 3] * 2,
            [[14.0] * 4] * 2,
        ]
