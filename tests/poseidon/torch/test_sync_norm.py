"""SyncBatchNorm normalizes over all workers, on the CPU too."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from poseidon.torch import sync_norm
from poseidon.torch.group import Group
from poseidon.torch.update_rules import SGD
from tests.support.module_groups import BUILDING, How, assert_same, together
from tests.support.simulated_device import simulated_devices

STEPS, BATCH, RATE = 4, 12, 0.1


def plain(rank: int) -> nn.Module:
    with BUILDING, torch.random.fork_rng():
        torch.manual_seed(rank)
        return nn.Sequential(
            nn.Conv1d(3, 4, 2),
            nn.BatchNorm1d(4, momentum=0.3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(12, 5),
            nn.BatchNorm1d(5, affine=False, momentum=None),
        )


def build(rank: int) -> nn.Module:
    module: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(plain(rank))
    return module


def batches() -> list[tuple[Tensor, Tensor]]:
    data = torch.Generator().manual_seed(4)
    return [
        (torch.randn(BATCH, 3, 4, generator=data) + 5, torch.randn(BATCH, 5, generator=data))
        for _ in range(STEPS)
    ]


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)


def one_process() -> dict[str, Tensor]:
    module = plain(0)
    optimizer = momentum(module)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
    return module.state_dict()


def loop(bounds: tuple[int, ...]) -> Callable[[nn.Module, Group], None]:
    def body(module: nn.Module, group: Group) -> None:
        for x, y in batches():
            own = slice(*bounds[group.rank : group.rank + 2])
            loss = nn.functional.mse_loss(module(x[own]), y[own])
            group.weigh(loss, len(x[own])).backward()
            group.step()

    return body


@pytest.mark.parametrize("how", [SGD(lr=RATE, momentum=0.9), momentum], ids=["rule", "torch"])
@pytest.mark.parametrize("bounds", [(0, BATCH), (0, 6, BATCH), (0, 8, BATCH), (0, 1, 5, BATCH)])
def test_workers_normalize_as_one_process_with_the_whole_batch(
    how: How, bounds: tuple[int, ...]
) -> None:
    ends = together(len(bounds) - 1, build, how, loop(bounds))
    assert_same(ends, one_process(), rtol=2e-5)


def test_a_batch_that_fills_a_turn_does_not_count() -> None:
    def body(module: nn.Module, group: Group) -> None:
        x, y = batches()[0]
        own = [(x[:8], y[:8])] if group.rank == 0 else [(x[8:], y[8:]), (x[:2], y[:2])]
        for part, target in group.epoch(own):
            loss = nn.functional.mse_loss(module(part), target)
            group.weigh(loss, len(part)).backward()
            group.step()

    module = plain(0)
    optimizer = momentum(module)
    x, y = batches()[0]
    for part in (slice(None), slice(2)):
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x[part]), y[part]).backward()
        optimizer.step()
    assert_same(together(2, build, momentum, body), module.state_dict(), rtol=2e-5)


def test_evaluation_and_copies_are_torch_s_own() -> None:
    module = build(0)
    kept: list[nn.Module] = []

    def body(own: nn.Module, group: Group) -> None:
        x = batches()[0][0]
        own.eval()
        other = copy.deepcopy(own)
        content = io.BytesIO()
        torch.save(own, content)
        content.seek(0)
        kept.extend([other, torch.load(content, weights_only=False)])
        own(x)  # of one worker alone: nothing is exchanged
        for one in kept:
            assert torch.equal(one(x), own(x))
            one.train()(x)  # without a process group
        assert torch.equal(kept[0](x), kept[1](x))

    together(1, lambda _: module, momentum, body)
    assert all("forward" not in vars(layer) for layer in module.modules())


def test_an_input_of_16_bits_keeps_its_type() -> None:
    def body(module: nn.Module, group: Group) -> None:
        x = torch.randn(4, 5, dtype=torch.bfloat16)
        assert module(x).dtype is torch.bfloat16
        module(x).float().square().sum().backward()
        group.step()

    together(1, lambda _: nn.SyncBatchNorm(5).bfloat16(), momentum, body)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_layer_on_a_gpu_waits_once_for_its_sums(momentum: float | None) -> None:
    """They go to other workers and come back; the number of elements is on the host all the time."""
    with simulated_devices(1, 5) as (device,):
        layer = nn.SyncBatchNorm(3, momentum=momentum).to(device.torch)
        forward = sync_norm._Forward(layer, lambda payload: [payload], lambda: True)
        x = torch.randn(4, 3, 2).to(device.torch)
        device.waits.clear()
        forward(x)
        assert device.waits == {"copy out": 1, "copy in": 1}
