"""Collectives among workers of one process over real sockets, beside what torch computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from poseidon.errors import UsageError
from poseidon.torch.process_group import collectives
from poseidon.torch.process_group.collectives import Collectives
from poseidon.torch.process_group.mesh import Mesh
from poseidon.torch.process_group.worker_parts import ReduceRule, reduced
from ps_server.keys import JobKeys
from ps_server.network import Network
from tests.support.polling import until

T = TypeVar("T")


class Launcher:
    """Gathers the payloads of threads as a launcher gathers the payloads of processes."""

    def __init__(self, size: int) -> None:
        self._payloads = [""] * size
        self._barrier = threading.Barrier(size)

    def gather(self, rank: int, payload: str) -> Sequence[str]:
        self._payloads[rank] = payload
        self._barrier.wait(20)
        found = tuple(self._payloads)
        self._barrier.wait(20)
        return found


@contextmanager
def meshes(
    size: int,
    *,
    encrypted: bool = False,
    on_failure: Callable[[Exception], None] = lambda _: None,
    place: Callable[[int], str] = lambda _: "",
    hosts: Sequence[Sequence[int]] = (),
) -> Iterator[list[Mesh]]:
    launcher = Launcher(size)
    keys = JobKeys.new(workers=size, shards=0)
    made = [
        Mesh(
            Network(
                rank=rank,
                size=size,
                token=b"secret",
                timeout_s=20,
                keys=keys.of_worker(0) if encrypted and rank == 0 else None,
            ),
            lambda payload, rank=rank: launcher.gather(rank, payload),
            on_failure=on_failure,
            place=lambda rank=rank: place(rank),
            neighbours=next((host for host in hosts if rank in host), ()),
        )
        for rank in range(size)
    ]
    try:
        yield made
    finally:
        on_all(made, Mesh.close)


def on_all(workers: Sequence[T], call: Callable[[T], object]) -> list[object]:
    with ThreadPoolExecutor(len(workers)) as pool:
        return [future.result(60) for future in [pool.submit(call, w) for w in workers]]


def tensors(size: int, numbers: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    if dtype.is_floating_point:
        return [torch.randn(numbers, generator=generator).to(dtype) for _ in range(size)]
    return [torch.randint(0, 50, (numbers,), generator=generator, dtype=dtype) for _ in range(size)]


REDUCTIONS = [
    (0, torch.float32, ReduceRule.SUM),
    (7, torch.float32, ReduceRule.SUM),
    (100_003, torch.float32, ReduceRule.MEAN),
    (50_001, torch.bfloat16, ReduceRule.SUM),
    (20_000, torch.int64, ReduceRule.MAX),
    (12, torch.int32, ReduceRule.XOR),
    (9, torch.float64, ReduceRule.PRODUCT),
    (70_000, torch.float16, ReduceRule.MIN),
]
HOSTS = {"one worker a host": (), "one host": [range(3)], "two hosts": [range(2), range(2, 3)]}


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce(
    size: int, encrypted: bool, hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "SEGMENT_BYTES", 64 * 1024)  # several segments
    given = [tensors(size, numbers, dtype) for numbers, dtype, _ in REDUCTIONS]

    def run(mesh: Mesh) -> list[Tensor]:
        group = Collectives(mesh, "0", range(size))
        found = [of_ranks[mesh.rank].clone() for of_ranks in given]
        for own, (_, _, reduction) in zip(found, REDUCTIONS, strict=True):
            group.all_reduce(own, reduction)
        return found

    with meshes(size, encrypted=encrypted, hosts=HOSTS[hosts]) as made:
        results = on_all(made, run)
    for of_ranks, case, *found in zip(given, REDUCTIONS, *results, strict=True):
        assert all(torch.equal(own, reduced(of_ranks, case[2])) for own in found), case


def test_a_sum_has_the_order_of_the_ranks_and_16_bits_are_rounded_once() -> None:
    big, one = torch.tensor([2.0**24]), torch.tensor([1.0])
    assert reduced([big, one, one], ReduceRule.SUM).item() == 2.0**24
    assert reduced([one, one, big], ReduceRule.SUM).item() == 2.0**24 + 2
    halves = [torch.tensor([256.0], dtype=torch.bfloat16)] + [
        torch.tensor([1.0], dtype=torch.bfloat16)
    ] * 2
    assert reduced(halves, ReduceRule.SUM).item() == 258
    assert reduced([torch.tensor([1.0])] * 3, ReduceRule.MEAN).item() == 1
    assert reduced([torch.tensor([-3]), torch.tensor([-2])], ReduceRule.MEAN).item() == -2
    assert reduced([torch.tensor([3j]), torch.tensor([2j])], ReduceRule.MEAN).item() == 2.5j


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("numbers", [5, 40_001])
def test_other_collectives(numbers: int, hosts: str) -> None:
    size = 3
    given = tensors(size, numbers, torch.float32)

    def run(mesh: Mesh) -> None:
        group, rank = Collectives(mesh, "0", range(size)), mesh.rank
        own = given[rank].clone()
        group.broadcast(own, 1)
        assert torch.equal(own, given[1])
        assert all(map(torch.equal, group.all_gather(given[rank]), given))
        gathered = group.gather(given[rank], 2)
        assert len(gathered) == (size if rank == 2 else 0)
        assert all(map(torch.equal, gathered, given))
        group.scatter(own, given, 2)
        assert torch.equal(own, given[rank])
        own = given[rank].clone()
        group.reduce(own, ReduceRule.SUM, 0)
        assert torch.equal(own, reduced(given, ReduceRule.SUM) if rank == 0 else given[rank])
        share = group.reduce_scatter([given[rank] + other for other in range(size)], ReduceRule.SUM)
        assert torch.equal(share, reduced([part + rank for part in given], ReduceRule.SUM))
        results = [torch.zeros(numbers) for _ in range(size)]
        group.all_to_all([given[rank] + other for other in range(size)], results)
        assert all(torch.equal(got, given[other] + rank) for other, got in enumerate(results))
        receive = group.receiving(own, (rank - 1) % size, 7)
        group.sending(given[rank], (rank + 1) % size, 7)()
        receive()
        assert torch.equal(own, given[(rank - 1) % size])
        group.barrier()

    with meshes(size, hosts=HOSTS[hosts]) as made:
        on_all(made, run)


def test_a_tensor_can_be_resized_after_a_collective() -> None:
    def run(mesh: Mesh) -> None:
        group, own = Collectives(mesh, "0", range(2)), torch.ones(5)
        group.all_reduce(own, ReduceRule.SUM)
        group.broadcast(own, 0)
        group.all_gather(own)
        own.resize_(9)  # as torch's batched_powerSGD_hook does with a bucket

    with meshes(2) as made:
        on_all(made, run)


def test_a_large_payload_stays_whole_though_its_sender_writes_to_it_and_leaves() -> None:
    given = torch.arange(40_000.0)

    def run(mesh: Mesh) -> None:
        group = Collectives(mesh, "0", range(2))
        own = given.clone()
        if mesh.rank:
            receive = group.receiving(own.zero_(), 0, 1)
            group.barrier()
            receive()
            assert torch.equal(own, given)
        else:
            group.sending(own, 1, 1)()
            own.zero_()
            group.barrier()
            mesh.flush()

    with meshes(2, hosts=[range(2)]) as made:
        on_all(made, run)


def test_memory_of_a_worker_of_another_host_is_not_opened() -> None:
    def run(mesh: Mesh) -> int | None:
        Collectives(mesh, "0", range(2)).barrier()
        if mesh.rank:  # takes worker 0 for a neighbour, which does not take it for one
            Collectives(mesh, "1", range(2)).sending(torch.zeros(40_000), 0, 1)()
            return None
        links = mesh._links.found
        assert links is not None
        until(lambda: links.dropped > 0, "the message was taken", 20)
        return links.dropped

    with meshes(2) as made:
        made[1].memory.neighbours = frozenset((0, 1))
        assert on_all(made, run)[0] == 1


def test_a_group_of_some_workers() -> None:
    given = tensors(3, 4, torch.float32)

    def run(mesh: Mesh) -> None:
        everybody = Collectives(mesh, "0", range(3))
        everybody.barrier()
        if mesh.rank != 1:
            own = given[mesh.rank].clone()
            Collectives(mesh, "1", [2, 0]).all_reduce(own, ReduceRule.SUM)
            assert torch.equal(own, given[2] + given[0])
        everybody.barrier()

    with meshes(3) as made:
        on_all(made, run)


def test_different_calls_are_an_error_that_names_both() -> None:
    def run(mesh: Mesh) -> str:
        group = Collectives(mesh, "0", range(2))
        group.barrier()
        with pytest.raises(UsageError) as error:
            if mesh.rank:
                group.all_reduce(torch.zeros(3), ReduceRule.SUM)
            else:
                group.all_gather(torch.zeros(2))
        return str(error.value)

    with meshes(2) as made:
        first, second = on_all(made, run)
    assert first == (
        "worker 0 calls all_gather(2 x float32), but worker 1 all_reduce(3 x float32, sum); "
        "all workers must make the same calls in the same order"
    )
    assert "worker 1 calls all_reduce" in str(second)


def test_a_receive_of_a_different_tensor_is_an_error_that_names_both_calls() -> None:
    def run(mesh: Mesh) -> str:
        group = Collectives(mesh, "0", range(2))
        if mesh.rank:
            group.sending(torch.zeros(4), 0, 1)()
            return ""
        with pytest.raises(UsageError) as error:
            group.receiving(torch.zeros(1), 1, 1)()
        return str(error.value)

    with meshes(2) as made:
        first, _ = on_all(made, run)
    assert first == (
        "worker 0 calls recv(1 x float32, tag 1), but worker 1 send(4 x float32, tag 1); "
        "all workers must make the same calls in the same order"
    )


def test_a_worker_that_has_left_is_an_error() -> None:
    def run(mesh: Mesh) -> None:
        group = Collectives(mesh, "0", range(2))
        assert not mesh.is_connected
        group.barrier()
        assert mesh.is_connected
        if mesh.rank:
            mesh.close()
            return
        with pytest.raises(UsageError, match=r"worker 0 calls barrier\(\), but worker 1 has left"):
            group.barrier()

    with meshes(2) as made:
        on_all(made, run)
