"""A weight that travels as factors: its pairs' memory, its base, and what a worker sees ahead of
the base.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from poseidon.exchange.base import Trained
from poseidon.exchange.device import DONE, HOST
from poseidon.exchange.factors.factor_rounds import Pair
from poseidon.exchange.factors.products import Kernel, Scratch
from poseidon.exchange.factors.weight import FactorWeight
from ps_server import Rule

CPU = torch.device("cpu")


def weight_of(staleness: int) -> FactorWeight:
    trained = Trained(name="fc", tensor=nn.Parameter(torch.ones(2, 3)), rule=Rule(momentum=0.5))
    weight = FactorWeight(
        0,
        trained,
        [torch.zeros(6)],
        clock=0,
        staleness=staleness,
        device=HOST,
        scratch=Scratch(CPU),
    )
    weight.open()
    return weight


def copied(weight: FactorWeight, iteration: int, u_KN: Tensor, v_KM: Tensor) -> Pair:
    pair, _ = weight.copy(iteration, u_KN, v_KM, None, DONE)
    return pair


def test_the_memory_of_a_pair_is_used_again_once_every_worker_has_it() -> None:
    for staleness in (0, 2):
        weight = weight_of(staleness)
        pairs = [copied(weight, i, torch.full((4, 2), i), torch.full((4, 3), i)) for i in range(8)]
        period = 2 * staleness + 2
        same = [pairs[i].u.ctypes.data == pairs[0].u.ctypes.data for i in range(8)]
        assert same == [i % period == 0 for i in range(8)]
        assert pairs[7].u.shape == (4, 2)
        assert (pairs[7].v == 7).all()


def test_memory_grows_with_the_batch() -> None:
    weight = weight_of(0)
    assert copied(weight, 0, torch.ones(2, 2), torch.ones(2, 3)).u.shape == (2, 2)
    assert copied(weight, 2, torch.ones(5, 2), torch.ones(5, 3)).u.shape == (5, 2)
    assert copied(weight, 4, torch.empty(0, 2), torch.empty(0, 3)).v.shape == (0, 3)


def test_a_worker_sees_the_base_with_its_own_open_pairs_on_top() -> None:
    weight = weight_of(1)
    u, v = torch.ones(4, 2), torch.ones(4, 3)
    weight.apply(0, u, v, rate=0.5, scale=0.25, kernel=Kernel.PORTABLE)
    assert torch.equal(weight.base, torch.full((2, 3), 0.5))
    assert torch.equal(weight.tensor, torch.ones(2, 3))
    pair = copied(weight, 1, u, v)
    weight.replay([(1, 0.5, pair)], scale=0.25, kernel=Kernel.PORTABLE)
    assert torch.equal(weight.tensor, torch.full((2, 3), 0.5 - 0.5 * 0.5 - 0.5))
    assert torch.equal(weight.base, torch.full((2, 3), 0.5))
    assert torch.equal(weight.history[0], torch.full((2, 3), 0.5))
    weight.replay([], scale=0.25, kernel=Kernel.PORTABLE)
    assert torch.equal(weight.tensor, weight.base)
