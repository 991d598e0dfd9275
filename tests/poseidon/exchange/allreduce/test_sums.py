"""Sums over workers that are threads: the bits of the tree, whoever computes for whom."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from poseidon.exchange.allreduce.sums import Sums
from poseidon.exchange.device import HOST
from poseidon.exchange.peers import Peers
from ps_server import PeerLeft, StalenessTimeout
from ps_server.keys import JobKeys
from ps_server.network import Network
from ps_server.protocol.virtual_workers import Node, TreeSum, VirtualWorkers
from tests.support.polling import until

SIZES = {3: 5, 1: 700, 0: 1}
ROUNDS = 3


def networks(workers: int, *, timeout_s: float = 20.0, encrypted: bool = False) -> list[Network]:
    keys = JobKeys.new(workers=workers, shards=0)
    return [
        Network(
            rank=rank,
            size=workers,
            token=b"secret",
            timeout_s=timeout_s,
            keys=keys.of_worker(rank) if encrypted else None,
        )
        for rank in range(workers)
    ]


def together(
    settings: Sequence[Network],
    workers: VirtualWorkers,
    body: Callable[[int, Sums, Peers], None],
    *,
    bucket_bytes: int = 256,
    lend: bool = False,
) -> None:
    """Run `body(rank, sums, peers)` on a thread for every worker; its memory is lent to all."""
    ends = []
    for network in settings:
        peers = Peers(network)
        ends.append((peers, Sums(SIZES, peers, workers, HOST, bucket_bytes=bucket_bytes)))
    addresses = [peers.links.address for peers, _ in ends]
    for peers, _ in ends:
        peers.links.connect(addresses)
    for _, sums in ends if lend else ():
        sums.memory.lend()
    if lend:
        opened = lambda: all(len(sums.memory.lent) == len(ends) - 1 for _, sums in ends)  # noqa: E731
        until(opened, "the workers have not opened each other's memory", 20.0)

    def run(rank: int) -> None:
        peers, sums = ends[rank]
        try:
            body(rank, sums, peers)
        finally:
            sums.close(ROUNDS)

    with ThreadPoolExecutor(len(ends)) as pool:
        for future in [pool.submit(run, rank) for rank in range(len(ends))]:
            future.result()


def gradient(virtual_worker: int, round_: int, index: int) -> Tensor:
    numbers = np.random.default_rng([virtual_worker, round_, index])
    return torch.from_numpy(numbers.standard_normal(SIZES[index]).astype(np.float32))


def sum_of(node: Node, count: int, round_: int, index: int) -> Tensor:
    tree: TreeSum[Tensor] = TreeSum(count, lambda left, right, _: left + right)
    for leaf in range(node.start, node.stop):
        top = tree.put(Node(leaf, leaf + 1), gradient(leaf, round_, index))
    return tree.parts[top]


BOUNDS = [
    *(tuple(range(workers + 1)) for workers in range(1, 6)),
    (0, 2, 3),
    (0, 1, 5),
    (0, 3, 5, 7),
    (0, 3, 6, 9, 12),
    (0, 7),
]


@pytest.mark.parametrize("lend", [False, True], ids=["", "lent"])
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_means_have_the_bits_of_the_tree(
    bounds: tuple[int, ...], lend: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = VirtualWorkers(bounds)
    whole = Node(0, workers.count)
    sent_bytes = []
    send = Peers.send

    def counted(peers: Peers, to: Sequence[int], kind: str, *numbers: int, **named: Any) -> None:
        if kind in ("Part", "Mean"):
            sent_bytes.append(memoryview(named["payload"]).nbytes)
        send(peers, to, kind, *numbers, **named)

    monkeypatch.setattr(Peers, "send", counted)

    def body(rank: int, sums: Sums, _: Peers) -> None:
        for round_ in range(ROUNDS):
            for node in workers.nodes(rank):
                for index in SIZES:
                    sums.fill(index, sum_of(node, workers.count, round_, index))
            for index in SIZES:
                expected = sum_of(whole, workers.count, round_, index).div_(workers.count)
                mean = sums.mean(index, round_)
                assert torch.equal(mean, expected)
                mean.fill_(float("nan"))  # it may be written to

    together(networks(workers.processes), workers, body, lend=lend)
    assert any(sent_bytes) == (workers.processes > 1 and not lend)


@pytest.mark.parametrize("encrypted", [False, True])
def test_values_of_rank_0_come_to_all_and_count_as_no_traffic(encrypted: bool) -> None:
    one_each = VirtualWorkers.one_each(3)

    def body(rank: int, sums: Sums, peers: Peers) -> None:
        ready.wait()
        for round_ in range(2):
            sums.expect_values()
            ready.wait()
            if rank == 0:
                sums.send_values({index: gradient(0, round_, index) for index in SIZES})
            for index in SIZES:
                assert torch.equal(sums.mean(index, 0), gradient(0, round_, index))
        assert all(
            not one.bytes_out and not one.bytes_in for one in sums.traffic.of_tensors().values()
        )
        ready.wait()
        for index in SIZES:
            sums.fill(index, torch.full((SIZES[index],), float(rank)))
        assert all(sums.mean(index, 0).eq(1).all() for index in SIZES)
        moved = sum(one.bytes_out + one.bytes_in for one in sums.traffic.of_tensors().values())
        whole = 4 * sum(SIZES.values())
        assert abs(moved - 2 * 2 * whole * 2 / 3) < 100  # 2 (P - 1) / P each way, in whole elements

    ready = threading.Barrier(3)
    together(networks(3, encrypted=encrypted), one_each, body)


def test_a_worker_that_leaves_early_is_named() -> None:
    def body(rank: int, sums: Sums, _: Peers) -> None:
        if rank == 2:
            return
        for index in SIZES:
            sums.fill(index, None)
        with pytest.raises(PeerLeft, match=rf"^worker 2 has left after {ROUNDS} .* worker {rank} "):
            sums.mean(0, ROUNDS)
        told.wait()  # who leaves first would be named to the other one

    told = threading.Barrier(2)
    together(networks(3), VirtualWorkers.one_each(3), body)


def test_a_worker_that_sends_nothing_is_named() -> None:
    def body(rank: int, sums: Sums, _: Peers) -> None:
        if rank == 0:
            for index in SIZES:
                sums.fill(index, None)
            with pytest.raises(StalenessTimeout, match="the sum of iteration 7 did not arrive"):
                sums.mean(0, 7)
            ended.set()
        else:
            assert ended.wait(20)

    ended = threading.Event()
    together(networks(2, timeout_s=0.2), VirtualWorkers.one_each(2), body)
