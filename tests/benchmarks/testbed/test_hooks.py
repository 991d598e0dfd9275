"""DDP's communication hooks: their names, their periods, and that torch takes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed

from benchmarks.testbed.ddp_worker import DdpTraining
from benchmarks.testbed.emulated import VALUE
from benchmarks.testbed.hooks import ALL_HOOKS, Hook, HookKind, attach, local_rounds
from benchmarks.testbed.worker_settings import DdpSettings, TrainingSettings
from poseidon.observe.plan.shapes import LayerShape

TRAINING = TrainingSettings(
    layers=(
        LayerShape(name="conv", tensors=((20, 16, 3, 3), (20,)), work=1),
        LayerShape(name="fc", tensors=((30, 20), (30,)), work=1, fully_connected=True),
    ),
    batch=4,
    compute_s=0.0,
    rate=1000.0,  # gradients are 1e-6
    weight_decay=0.0,
)


LAST_GROUP: list[object] = []
"""The last process group.

A hook's callback may still hold it in gloo's thread, which cannot end itself: the process aborts.
"""


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    LAST_GROUP[:] = [distributed.group.WORLD]
    yield
    distributed.destroy_process_group()


def test_texts_name_hooks() -> None:
    hooks = [Hook.parse(text) for text in ("fp16", "powersgd:2", "post-local:8", "diloco:20")]
    assert [hook.name for hook in hooks] == [
        "fp16",
        "PowerSGD 2",
        "post-local 8",
        "DiLoCo loop 20",
    ]
    assert [hook.period for hook in hooks] == [1, 1, 8, 20]
    assert {Hook.parse(text).kind for text in ALL_HOOKS} == set(HookKind)


@pytest.mark.parametrize("text", ["", "fp32", "fp16:2", "powersgd", "powersgd:0", "post-local:x"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Hook.parse(text)


@pytest.mark.parametrize("hook", ["", "fp16", "powersgd:1", "powersgd:4", "post-local:2"])
def test_a_replica_trains_with_each_hook(hook: str, group: None) -> None:
    """A single worker's average is its own gradient, which has rank 1: every hook takes the same
    steps, float16 nearly.
    """
    plain, hooked = DdpTraining(TRAINING, None), DdpTraining(TRAINING, DdpSettings(hook=hook))
    for _ in range(6):
        plain.iterate()
        hooked.iterate()
    for one, other in zip(plain.parameters(), hooked.parameters(), strict=True):
        moved = one - VALUE
        assert moved.max() < -VALUE
        torch.testing.assert_close(other - VALUE, moved, rtol=0.03, atol=0.0)


def test_diloco_steps_from_the_anchor_by_the_outer_rule(group: None) -> None:
    """By hand: each round of two steps changes the weight by -1, and the outer rule is Nesterov's
    SGD with rate 0.7 and momentum 0.9.
    """
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    after_step = local_rounds(net, period=2)
    found = []
    for _ in range(4):
        with torch.no_grad():
            net.weight -= 0.5
        after_step()
        found.append(net.weight.item())
    first = -0.7 * (1 + 0.9)
    second = first - 0.7 * (1 + 0.9 * (0.9 + 1))
    assert found == pytest.approx([-0.5, first, first - 0.5, second])


def test_diloco_is_no_hook_of_ddp(group: None) -> None:
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="diloco is not a communication hook"):
        attach(net, Hook.parse("diloco:2"))
