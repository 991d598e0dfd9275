"""Who has handed in what; stacked factors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from poseidon.exchange.host.contributions import Contributions, FactorStack, HostTree
from ps_server import RemoteProtocolError
from ps_server.protocol.virtual_workers import VirtualWorkers


def test_an_iteration_is_complete_when_nothing_is_missing() -> None:
    counted = Contributions([False, True], [1, 1])
    assert counted.complete
    counted.start()
    assert not counted.note(0, 1)
    assert counted.note(0, 0)
    assert not counted.note(1, 0)
    assert counted.note(1, 1)
    assert not counted.complete  # the tensor of factors is not released
    assert not counted.note(1, 1, release=True)
    assert (counted.owes(0), counted.owes(1)) == (True, False)
    assert counted.note(1, 0, release=True)
    assert counted.complete
    counted.start()
    assert not counted.complete
    assert counted.owes(1)


def test_a_worker_gives_as_many_parts_as_it_has_nodes() -> None:
    counted = Contributions([False, True], [1, 2])
    counted.start()
    assert not counted.note(0, 1)
    assert not counted.note(0, 0)
    assert counted.owes(1)
    assert counted.note(0, 1)
    with pytest.raises(RemoteProtocolError, match="worker 1 contributes too often"):
        counted.note(0, 1)
    assert not counted.note(1, 1)
    assert counted.note(1, 0)  # factors come as one


def packed(u: torch.Tensor, v: torch.Tensor) -> bytearray:
    return bytearray(np.concatenate([u.numpy().ravel(), v.numpy().ravel()]).tobytes())


def test_the_product_of_the_stack_is_the_mean_gradient_whatever_comes_first() -> None:
    stack = FactorStack(torch.empty(2, 3), divisor=3)
    parts = [(torch.randn(rows, 2), torch.randn(rows, 3)) for rows in (2, 1, 4)]
    for order in ((0, 1, 2), (2, 1, 0)):
        for worker in order:
            u, v = parts[worker]
            if worker == 1:
                stack.own(worker, u, v)
            else:
                stack.add(worker, u.shape[0], packed(u, v))
        u_RN, v_RM = stack.take()
        assert torch.equal(v_RM, torch.cat([v for _, v in parts]))
        torch.testing.assert_close(u_RN.t() @ v_RM, sum(u.t() @ v for u, v in parts) / 3)


def test_the_stack_uses_its_memory_again_and_forgets_what_was_in_it() -> None:
    stack = FactorStack(torch.empty(2, 3), divisor=2)
    stack.own(0, torch.ones(3, 2), torch.ones(3, 3))
    first = stack.take()[0].data_ptr()
    stack.add(1, 0, bytearray())
    assert stack.take()[0].shape == (0, 2)
    stack.add(1, 1, packed(torch.ones(1, 2), torch.full((1, 3), 7.0)))
    u_RN, v_RM = stack.take()
    assert u_RN.tolist() == [[0.5, 0.5]]
    assert v_RM.tolist() == [[7.0, 7.0, 7.0]]
    assert u_RN.data_ptr() == first


def test_factors_of_another_size_are_refused() -> None:
    stack = FactorStack(torch.empty(2, 3), divisor=2)
    with pytest.raises(RemoteProtocolError, match="factors of 2 rows for 2 x 3 come in 20 bytes"):
        stack.add(1, 2, packed(torch.ones(1, 2), torch.ones(1, 3)))


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
