#!/usr/bin/env python3
"""Compare a training step of ResNet-50 by `poseidon.caffe2` with the same step in plain torch
with DDP, by turns.

    python benchmarks/caffe2_trainer.py [--shards 2] [--batch 8] [--side 64] [--turns 5]

Each shard is a process with one thread. It has both models: one by `data_parallel_model` with its
sums of gradients through a store in a folder, one by `DistributedDataParallel` with gloo. Images
are random and the same in each step. A turn is a step of each; the ratio compares the fastest turns
of shard 0. Without other shards DDP has a group of one process.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from poseidon.caffe2 import brew, core, optimizer, workspace
from poseidon.caffe2 import data_parallel_model as dpm
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.models import resnet

BLOCKS = (3, 4, 6, 3)
LABELS = 1000


class Bottleneck(nn.Module):
    """A block of ResNet-50, with the stride on the 3x3 convolution."""

    def __init__(self, before: int, inner: int, stride: int) -> None:
        super().__init__()
        after = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(before, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = nn.Sequential()
        if before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both paths, rectified."""
        total: Tensor = self.body(x) + self.shortcut(x)
        return total.relu_()


def plain_resnet50() -> nn.Module:
    """Return ResNet-50 of torch's modules."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    before = 64
    for stage, blocks in enumerate(BLOCKS):
        inner = 64 << stage
        for block in range(blocks):
            layers.append(Bottleneck(before, inner, 2 if block == 0 and stage else 1))
            before = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, LABELS))


def plain_step(
    rank: int, shards: int, folder: str, data: Tensor, label: Tensor
) -> Callable[[], Any]:
    """Return a training step of torch's model under DDP."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/ddp", rank=rank, world_size=shards
    )
    model = nn.parallel.DistributedDataParallel(plain_resnet50())
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    sgd = torch.optim.SGD(
        [{"params": weights, "weight_decay": 1e-4}, {"params": others}],
        0.001,
        momentum=0.9,
        nesterov=True,
    )

    def step() -> None:
        sgd.zero_grad()
        nn.functional.cross_entropy(model(data), label).backward()
        sgd.step()

    return step


def caffe2_step(
    rank: int, shards: int, folder: str, data: Tensor, label: Tensor
) -> Callable[[], Any]:
    """Return a training step of the data-parallel net."""
    rendezvous = None
    if shards > 1:
        handler = core.CreateOperator(
            "FileStoreHandlerCreate", [], ["store"], path=folder, prefix="caffe2"
        )
        workspace.RunOperatorOnce(handler)
        rendezvous = {
            "kv_handler": "store",
            "shard_id": rank,
            "num_shards": shards,
            "engine": "GLOO",
        }
    model = ModelHelper(name="resnet50")

    def layers(model: ModelHelper, loss_scale: float) -> list[Any]:
        softmax, loss = resnet.create_resnet50(
            model, "data", 3, LABELS, label="label", no_bias=True
        )
        brew.accuracy(model, [softmax, "label"], "accuracy")
        return [model.Scale(loss, scale=loss_scale)]

    def updates(model: ModelHelper) -> Any:
        optimizer.add_weight_decay(model, 1e-4)
        return optimizer.build_sgd(model, 0.001, momentum=0.9, nesterov=1, policy="fixed")

    dpm.Parallelize_CPU(
        model,
        input_builder_fun=lambda model: None,
        forward_pass_builder_fun=layers,
        optimizer_builder_fun=updates,
        devices=[0],
        rendezvous=rendezvous,
    )
    dpm.OptimizeGradientMemory(model, {}, set(), False)
    workspace.FeedBlob("cpu_0/data", data)
    workspace.FeedBlob("cpu_0/label", label.int())
    dpm.RunInitNet(model)
    name = model.net.Proto().name
    return lambda: workspace.RunNet(name)


def run_shard(rank: int, shards: int, folder: str, batch: int, side: int, turns: int) -> None:
    """Run both models by turns; shard 0 prints the result."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    data, label = torch.randn(batch, 3, side, side), torch.randint(0, LABELS, (batch,))
    steps = [make(rank, shards, folder, data, label) for make in (plain_step, caffe2_step)]
    best = [float("inf")] * len(steps)
    for turn in range(turns + 1):
        for index, step in enumerate(steps):
            torch.distributed.barrier()
            begin = time.perf_counter()
            step()
            if turn:  # the first one allocates
                best[index] = min(best[index], time.perf_counter() - begin)
    torch.distributed.destroy_process_group()
    if rank == 0:
        plain, caffe2 = best
        print(
            f"ResNet-50, {shards} shards of {batch} images of {side} x {side}: torch with DDP "
            f"{plain:.3f} s, "
            f"poseidon.caffe2 {caffe2:.3f} s, ratio {caffe2 / plain:.3f}"
        )


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="images of a shard")
    parser.add_argument("--side", type=int, default=64, help="of the images")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(
            run_shard,
            (args.shards, folder, args.batch, args.side, args.turns),
            nprocs=args.shards,
        )


if __name__ == "__main__":
    main()
