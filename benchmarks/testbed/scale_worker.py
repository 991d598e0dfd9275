"""One worker of a job that benchmarks/scale.py measures: `python scale_worker.py NET HOW STEPS`.

Law: it uses only torch and the public names of Poseidon, of the checkout that PYTHONPATH names.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import poseidon
from benchmarks.testbed.computed import COMPUTED
from benchmarks.torch_models import CifarQuick

OF_JOB = "SCALE_JOB"
"""The environment variable with the process whose descendants are the job's processes."""
WARM_UP = 5
MEASURED = "measured "
"""Begins the line with core-milliseconds for a step and a worker, and milliseconds of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """A net, and how it is trained.

    Attributes:
        build: makes the module.
        inputs: returns the arguments of each forward pass, without an end, given the rank.
        adamw: AdamW trains it, otherwise SGD with momentum.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Iterator[tuple[Tensor, ...]]]
    adamw: bool = False


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers of these widths with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _computed(name: str) -> Net:
    net = COMPUTED[name]
    batches = lambda rank: net.batches(rank=rank, rows=net.rows)  # noqa: E731
    return Net(build=net.build, inputs=batches, adamw=True)


def _random(*sizes: int) -> Callable[[int], Iterator[tuple[Tensor, ...]]]:
    return lambda _: itertools.repeat((torch.randn(*sizes),))


class ManySmall(nn.Module):
    """2,000 parameters of 64 elements: what a tensor costs beside its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.terms = nn.ParameterList([nn.Parameter(0.1 * torch.randn(64)) for _ in range(2000)])

    def forward(self, x: Tensor) -> Tensor:
        """Return a sum with all of them."""
        for term in self.terms:
            x = 0.99 * x + term
        return x


NETS: Mapping[str, Net] = {
    "quick": Net(
        build=CifarQuick,
        inputs=lambda _: itertools.repeat((torch.randn(2, 3, 32, 32), torch.randint(0, 10, (2,)))),
    ),
    "mlp": Net(build=lambda: mlp(512, 512, 512, 10), inputs=_random(2, 512)),
    "large": Net(build=lambda: mlp(1024, *[2048] * 5, 1000), inputs=_random(2, 1024)),
    "many": Net(build=ManySmall, inputs=_random(2, 64)),
    "gpt-2m": _computed("gpt-2m"),
    "gpt-20m": _computed("gpt-20m"),
}
"""0.15, 0.53, 20.9, 0.13, 1.9 and 19.2 million parameters."""


def processor_s() -> float:
    """Return the processor time of all processes of this job so far, in seconds."""
    total = 0.0
    for process in psutil.Process(int(os.environ[OF_JOB])).children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def main(name: str, how: str, steps: int) -> None:
    """Train; the first worker prints what was measured.

    Args:
        name: of the net.
        how: `ddp`, for torchrun and for `poseidon run --ddp`; `alone`, for torchrun: nothing is
            exchanged; `optimizer`: of torch, with `distribute`; `rule`: of the shards.
        steps: that count.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = NETS[name]
    module = net.build()
    trained: nn.Module = module
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.001, momentum=0.9)
    rule: poseidon.SGD | poseidon.AdamW = poseidon.SGD(lr=0.001, momentum=0.9)
    if net.adamw:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.001)
        rule = poseidon.AdamW(lr=0.001)
    if how in ("ddp", "alone"):
        dist.init_process_group("gloo")
        trained = DistributedDataParallel(module) if how == "ddp" else module
        step, rank, size = optimizer.step, dist.get_rank(), dist.get_world_size()
    else:
        group = poseidon.distribute(module, optimizer if how == "optimizer" else rule)
        step, rank, size = group.step, group.rank, group.size
    meet = dist.barrier if how == "alone" else lambda: None  # all others wait in each step
    began = (0.0, 0.0)
    for number, inputs in zip(range(WARM_UP + steps), net.inputs(rank), strict=False):
        if number == WARM_UP:
            meet()
            began = (processor_s(), time.perf_counter()) if rank == 0 else began
        loss = trained(*inputs)
        (loss if loss.ndim == 0 else loss.square().mean()).backward()
        step()
        if how != "rule":
            optimizer.zero_grad()
    meet()
    if rank == 0:
        core_s, seconds = processor_s() - began[0], time.perf_counter() - began[1]
        print(f"{MEASURED}{1e3 * core_s / steps / size} {1e3 * seconds / steps}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
