"""Shards of one process, each on a thread, compute together; every failure is one sentence."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from poseidon.caffe2.shards import rendezvous, store_handler
from poseidon.caffe2.shards.common_world import CommonWorld
from poseidon.caffe2.shards.store_handler import CollectiveError, StoreHandler
from poseidon.caffe2.shards.stores import FolderStore

LIMIT_S = 30.0
SHARDS = 3


def handler(folder: Path, run: str = "run") -> StoreHandler:
    return StoreHandler(FolderStore(folder, run), run)


def together(folder: Path, call: Callable[[CommonWorld], Any], shards: int = SHARDS) -> list[Any]:
    """Call a function with the world of each shard, on threads."""

    def run(rank: int) -> Any:
        return call(
            CommonWorld(handler(folder), "world", rank=rank, size=shards, timeout_s=LIMIT_S)
        )

    with ThreadPoolExecutor(shards) as pool:
        return list(pool.map(run, range(shards)))


def own(world: CommonWorld, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((2, 2), world.rank + 1, dtype=dtype)


OPERATIONS: dict[str, tuple[Callable[[CommonWorld], Any], list[Any]]] = {
    "sum": (lambda w: w.all_reduce([own(w)])[0][0, 0].item(), [6, 6, 6]),
    "sum of devices": (
        lambda w: [t[0, 0].item() for t in w.all_reduce([own(w), own(w)])],
        [[12, 12]] * 3,
    ),
    "broadcast": (
        lambda w: [t[0, 0].item() for t in w.broadcast([own(w), own(w)], 1)],
        [[2, 2]] * 3,
    ),
    "reduce": (lambda w: w.reduce(own(w), 2)[0, 0].item(), [1, 2, 6]),
    "gather": (lambda w: w.all_gather([own(w)])[:, 0].tolist(), [[1, 1, 2, 2, 3, 3]] * 3),
    "gather of unequal counts": (
        lambda w: w.all_gather([own(w), own(w)[: w.rank]])[:, 0].tolist(),
        [[1, 1, 2, 2, 2, 3, 3, 3, 3]] * 3,
    ),
    "gather from one": (
        lambda w: w.all_gather([own(w)[: 2 * (w.rank == 1)]]).tolist(),
        [[[2, 2], [2, 2]]] * 3,
    ),
    "gather of nothing": (lambda w: w.all_gather([own(w)[:0]]).shape, [(0, 2)] * 3),
    "scatter": (
        lambda w: w.reduce_scatter([own(w) * torch.arange(4).view(2, 2)], [1, 2, 1])[0].tolist(),
        [[0], [6, 12], [18]],
    ),
    "barrier": (lambda w: w.barrier(), [None] * 3),
    "ring": (
        lambda w: (
            w.send(own(w), (w.rank + 1) % 3, 5) if w.rank else None,
            w.receive(own(w), (w.rank + 2) % 3, 5)[0, 0].item(),
            None if w.rank else w.send(own(w), 1, 5),
        )[1],
        [3, 1, 2],
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_against_arithmetic(name: str, tmp_path: Path) -> None:
    call, expected = OPERATIONS[name]
    assert together(tmp_path, call) == expected


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.int16]
)
def test_types_stay(dtype: torch.dtype, tmp_path: Path) -> None:
    for total in together(tmp_path, lambda world: world.all_reduce([own(world, dtype)])[0]):
        assert (total.dtype, total.tolist()) == (dtype, [[6, 6], [6, 6]])


def test_flags_are_broadcast(tmp_path: Path) -> None:
    for flag in together(tmp_path, lambda w: w.broadcast([torch.tensor([w.rank == 1])], 1)[0]):
        assert (flag.dtype, flag.tolist()) == (torch.bool, [True])


def test_inputs_stay_as_they_are(tmp_path: Path) -> None:
    def call(world: CommonWorld) -> float:
        given = own(world)
        (
            world.all_reduce([given]),
            world.broadcast([given]),
            world.reduce(given),
            world.all_gather([given]),
        )
        return float(given[0, 0])

    assert together(tmp_path, call) == [1, 2, 3]


def test_sums_have_the_same_bits_whoever_comes_first(tmp_path: Path) -> None:
    def run(folder: Path, late: int) -> list[torch.Tensor]:
        folder.mkdir()

        def call(world: CommonWorld) -> torch.Tensor:
            drawn = torch.randn(10_007, generator=torch.Generator().manual_seed(world.rank))
            if world.rank == late:
                time.sleep(0.02)
            return world.all_reduce([drawn, drawn / 3])[1]

        return together(folder, call)

    runs = [run(tmp_path / str(late), late) for late in range(SHARDS)]
    assert all(torch.equal(runs[0][0], total) for totals in runs for total in totals)


def test_a_slow_shard_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.caffe2.shards.process_group.WATCH_S", 0.01)

    def call(world: CommonWorld) -> float:
        if world.rank == 2:
            time.sleep(0.2)
        return float(world.all_reduce([own(world)])[0][0, 0])

    assert together(tmp_path, call) == [6, 6, 6]


def test_clones_and_worlds_of_one_name_are_apart(tmp_path: Path) -> None:
    def call(world: CommonWorld) -> list[float]:
        worlds = [world, world.clone("a"), world.clone("b"), world.clone("a")]
        order = worlds if world.rank else worlds[::-1]
        with ThreadPoolExecutor(4) as pool:
            sums = dict(
                zip(
                    map(id, order),
                    pool.map(lambda w: w.all_reduce([own(w)])[0], order),
                    strict=True,
                )
            )
        return [float(sums[id(w)][0, 0]) for w in worlds]

    assert together(tmp_path, call) == [[6] * 4] * 3


def test_a_world_of_one_shard_needs_no_store() -> None:
    world = CommonWorld(None, "alone", rank=0, size=1)
    world.barrier()
    assert world.all_reduce([own(world), own(world)])[1].tolist() == [[2, 2], [2, 2]]
    assert world.all_gather([own(world), own(world)]).shape == (4, 2)
    assert world.broadcast([own(world)])[0].tolist() == [[1, 1], [1, 1]]


def test_shards_that_end_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_handler, "ANSWER_S", 1.5)
    monkeypatch.setattr(store_handler, "LOOK_S", 0.05)
    monkeypatch.setattr("poseidon.caffe2.shards.process_group.WATCH_S", 0.05)

    def call(world: CommonWorld) -> str:
        world.barrier()
        if world.rank == 1:
            assert world._shards is not None
            monkeypatch.setattr(world._shards, "answer", lambda: True)
            world.close()
            return ""
        with pytest.raises(CollectiveError) as caught:
            world.all_reduce([own(world)])
        return str(caught.value)

    first, _, last = together(tmp_path, call)
    for rank, text in ((0, first), (2, last)):
        assert text.startswith(f"shard {rank} could not ") and "\n" not in text
        assert text.endswith(f"on {socket.gethostname()}) ended, or cannot be reached")
        assert "; shard 1 (process " in text


def test_a_shard_that_does_not_take_part_is_a_sentence_after_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_handler, "LOOK_S", 0.05)

    def call(rank: int) -> str:
        world = CommonWorld(handler(tmp_path), "world", rank=rank, size=2, timeout_s=1.0)
        if rank == 1:
            ended.result(LIMIT_S)
            return ""
        with pytest.raises(CollectiveError, match="all shards still run"):
            world.barrier()
        return "late"

    with ThreadPoolExecutor(2) as pool:
        ended = pool.submit(call, 0)
        other = pool.submit(call, 1)
        assert (ended.result(LIMIT_S), other.result(LIMIT_S)) == ("late", "")


def test_a_destroyed_world_is_a_sentence(tmp_path: Path) -> None:
    def call(world: CommonWorld) -> str:
        world.close()
        with pytest.raises(CollectiveError) as caught:
            world.barrier()
        return str(caught.value)

    assert together(tmp_path, call) == ["the common world world was destroyed"] * 3


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(CollectiveError, match=r"^shards 0, 2 of run 'run' did not come within 0.1"):
        CommonWorld(handler(tmp_path), "world", rank=1, size=3, timeout_s=0.1)


def test_a_run_id_that_was_used_before(tmp_path: Path) -> None:
    together(tmp_path, lambda world: world.barrier())
    with pytest.raises(CollectiveError, match=r"^run id 'run' was used"):
        CommonWorld(handler(tmp_path), "world", rank=1, size=3, timeout_s=LIMIT_S)


def test_ranks_are_below_the_size_and_the_same_in_all_worlds(tmp_path: Path) -> None:
    with pytest.raises(CollectiveError, match="rank 2 of 2 shards: expected 0 to 1"):
        CommonWorld(handler(tmp_path), "world", rank=2, size=2)
    with pytest.raises(CollectiveError, match="needs a store handler"):
        CommonWorld(None, "world", rank=0, size=2)

    def call(rank: int) -> None:
        shared = handler(tmp_path)
        CommonWorld(shared, "world", rank=rank, size=2, timeout_s=LIMIT_S)
        with pytest.raises(
            CollectiveError, match=rf"has rank {rank} of 3, and an earlier one .* {rank} of 2"
        ):
            CommonWorld(shared, "other", rank=rank, size=3, timeout_s=LIMIT_S)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, range(2)))


def test_a_name_that_resolves_to_a_loopback_address_is_a_sentence_between_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_handler, "published_address", lambda choice: "127.0.1.1")
    networks = iter(["host a", "host b"])
    monkeypatch.setattr(rendezvous, "network_id", lambda: next(networks))

    def call(rank: int) -> str:
        with pytest.raises(CollectiveError) as caught:
            CommonWorld(handler(tmp_path), "world", rank=rank, size=2, timeout_s=LIMIT_S)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        for text in pool.map(call, range(2)):
            assert text.startswith("shard 0 on ") and "publishes 127.0.1.1, since the name" in text
            assert "--distributed_interfaces" in text
