"""The part of the tree of sums that the workers of a host add."""

from __future__ import annotations

import torch

from poseidon.exchange.host.tree import HostTree
from ps_server.protocol.virtual_workers import VirtualWorkers


def parts(*numbers: float) -> list[list[torch.Tensor]]:
    return [[torch.tensor([number])] for number in numbers]


def test_parts_are_added_in_a_tree() -> None:
    (mean,) = HostTree.mean(4).sums(parts(1e8, -1e8, 1.0, 3.0))
    assert mean.item() == 1.0


def test_the_mean_is_over_the_workers() -> None:
    (mean,) = HostTree.mean(3).sums(parts(10.0, 20.0, 31.0))
    torch.testing.assert_close(mean, torch.tensor([61.0 / 3]))


def test_of_virtual_workers_the_nodes_of_the_host_are_sums() -> None:
    tree = HostTree(placed=VirtualWorkers((0, 1, 2, 3, 4, 5)), first=1, workers=3, averages=False)
    # of the tree ((0 + 1) + (2 + 3)) + 4 this host has 1, 2 and 3
    found = tree.sums(parts(1.0, 2.0, 3.0))
    assert [total.item() for total in found] == [1.0, 5.0]
    own = [total.item() for total in tree.sums(parts(1.0, 2.0, 3.0), encoded=True)]
    assert own == [1.0, 2.0, 3.0]
