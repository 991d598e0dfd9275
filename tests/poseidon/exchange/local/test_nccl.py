"""Tensors moved by collective operations; gloo stands in for NCCL."""

from __future__ import annotations

import threading

import torch

from poseidon.exchange.local.nccl import GroupTensors
from poseidon.exchange.local.process_group import Backend, Rendezvous
from ps_server.network import Network
from tests.support.threads import on_threads

ORDER = [2, 0, 1]


def test_parts_come_in_any_order_and_leave_in_one() -> None:
    address: list[str] = []
    opened = threading.Event()
    means: list[tuple[int, float]] = []

    def run(rank: int) -> None:
        network = Network(rank=rank, size=2, host="127.0.0.1", timeout_s=20.0)
        if rank == 0:
            rendezvous = Rendezvous(network)
            address.append(rendezvous.address)
            opened.set()
        else:
            opened.wait()
            rendezvous = Rendezvous(network, address[0])
        tensors = [torch.full((4,), 10.0 * rank + index) for index in range(3)]
        group = GroupTensors(
            tensors, order=ORDER, network=network, rendezvous=rendezvous, backend=Backend.GLOO
        )
        for iteration in range(2):
            _iteration(group, tensors, rank, iteration)
        group.close()

    def _iteration(
        group: GroupTensors, tensors: list[torch.Tensor], rank: int, iteration: int
    ) -> None:
        parts = {index: torch.full((4,), index + 1.0 + rank + iteration) for index in range(3)}
        if rank == 0:
            for index in (0, 1, 2):
                group.contribute(index, parts[index])
            for index in (1, 0, 2):  # nothing is due before tensor 2, whose turn comes first
                due = group.due(index)
                assert list(due) == ([] if index != 2 else ORDER)
            means.extend((index, group.sums(index, [parts[index]])[0][0].item()) for index in ORDER)
            for index in range(3):
                group.publish(index)
            for index in range(3):
                group.published(index)
        else:
            for index in (1, 2, 0):
                group.contribute(index, None if index == 1 else parts[index])
            for index in (2, 0, 1):  # those before it come with it
                group.receive(index)
                assert tensors[index].tolist() == [float(index)] * 4

    on_threads(2, run)
    assert means == [(2, 3.5), (0, 1.5), (1, 1.0), (2, 4.5), (0, 2.5), (1, 1.5)]
