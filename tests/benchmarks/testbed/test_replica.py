"""A worker's copy of the net: both systems train it alike."""

from __future__ import annotations

import pytest
import torch

from benchmarks.testbed.computed import TOKENS
from benchmarks.testbed.ddp_worker import DdpTraining
from benchmarks.testbed.poseidon_worker import PoseidonTraining
from benchmarks.testbed.replica import Replica
from benchmarks.testbed.worker_settings import TrainingSettings
from poseidon.observe.plan.shapes import LayerShape

EMULATED = TrainingSettings(
    layers=(LayerShape(name="fc", tensors=((3, 2),), work=1, fully_connected=True),),
    batch=2,
    compute_s=0.0,
)
GPT = TrainingSettings(layers=(), batch=TOKENS, compute_s=0.0, rate=0.001, computed="gpt-2m")


@pytest.mark.parametrize(
    ("training", "adamw", "kind"),
    [(EMULATED, False, torch.optim.SGD), (GPT, True, torch.optim.AdamW)],
)
def test_a_net_has_its_optimizer(training: TrainingSettings, adamw: bool, kind: type) -> None:
    replica = Replica(training, 0)
    assert replica.adamw == adamw
    assert type(replica.optimizer()) is kind


def test_all_ranks_begin_with_the_same_weights_and_have_their_own_batches() -> None:
    one, other = Replica(GPT, 0), Replica(GPT, 1)
    for x, y in zip(one.net.parameters(), other.net.parameters(), strict=True):
        assert torch.equal(x, y)
    assert one.loss(one.net) != other.loss(other.net)


def test_one_process_trains_alike_with_both_systems() -> None:
    """The example of `distribute` takes no batch away."""
    torch_alone, ours = DdpTraining(GPT, None), PoseidonTraining(GPT)
    losses = [[training.iterate() for _ in range(3)] for training in (torch_alone, ours)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]
