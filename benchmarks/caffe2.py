#!/usr/bin/env python3
"""Compare the running of a Caffe2 net with the same calls to torch, written by hand; measure
what memonger saves.

    python benchmarks/caffe2.py [--operators 500] [--sizes 16,1000,10000] [--turns 200]
    python benchmarks/caffe2.py --memory=BATCH [--side 224] [--cuda]

Net and calls run by turns on one thread; the ratio compares the fastest turns. Both keep all
results until the next turn.

With --memory: the peak memory of a training step of ResNet-50 (the second step; momentum SGD),
without memonger, with shared gradients, and with shared gradients and activations. Live bytes are
the bytes of the workspace's tensors after each operator; with --cuda also the peak of torch's
allocator.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import torch

from poseidon.caffe2 import brew, core, memonger, model_helper, optimizer, workspace
from poseidon.caffe2.models import resnet
from poseidon.caffe2.proto import DEVICE_NUMBERS
from poseidon.caffe2.workspace.current import current


def net_of(operators: int) -> core.Net:
    """Return a net of Relu, Add, Mul and Sigmoid by turns."""
    net = core.Net("overhead")
    x = net.AddExternalInput("x")
    net.AddExternalInput("b")
    for index in range(operators):
        kind = ("Relu", "Add", "Mul", "Sigmoid")[index % 4]
        x = getattr(net, kind)([x, "b"] if kind in ("Add", "Mul") else x, f"y{index}")
    return net


def by_hand(operators: int, x: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Return the results of the same calls."""
    results = []
    for _ in range(operators // 4):
        x = torch.relu(x)
        results.append(x)
        x = x + b
        results.append(x)
        x = x * b
        results.append(x)
        x = torch.sigmoid(x)
        results.append(x)
    return results


def fastest(turns: int, *calls: Callable[[], object]) -> list[float]:
    """Return the seconds of the fastest turn of each call."""
    best = [float("inf")] * len(calls)
    kept: list[object] = [None] * len(calls)
    for _ in range(turns):
        for index, call in enumerate(calls):
            begin = time.perf_counter()
            kept[index] = call()
            best[index] = min(best[index], time.perf_counter() - begin)
    return best


def resnet50(cuda: bool, sharing: str) -> tuple[core.Net, core.Net]:
    """Return the init net and the net of a training step.

    Args:
        cuda: whether it runs on a GPU.
        sharing: "none", "gradients" or "all".
    """
    model = model_helper.ModelHelper(name=f"resnet50_{sharing}", arg_scope={"order": "NCHW"})
    device = core.DeviceOption(DEVICE_NUMBERS["CUDA" if cuda else "CPU"], 0)
    with core.DeviceScope(device), core.NameScope("ns"):
        softmax, loss = resnet.create_resnet50(model, "data", 3, 1000, label="label", no_bias=True)
        brew.accuracy(model, [softmax, "label"], "accuracy")
    model.AddGradientOperators([loss])
    with core.DeviceScope(device):
        optimizer.build_sgd(model, 0.1, momentum=0.9, policy="fixed")
    if sharing != "none":
        shared = memonger.share_grad_blobs(
            model.net,
            [loss],
            model.param_to_grad.values(),
            "ns/",
            share_activations=sharing == "all",
        )
        model.net.Proto().CopyFrom(shared)
    return model.param_init_net, model.net


def live_bytes(gradients: bool = False) -> int:
    """Return the bytes of the tensors in the workspace, or of those that are gradients; shared
    memory counts once.
    """
    storages = {
        blob.value.untyped_storage().data_ptr(): blob.value.untyped_storage().nbytes()
        for name, blob in current().blobs.items()
        if isinstance(blob.value, torch.Tensor) and (not gradients or "_grad" in name)
    }
    return sum(storages.values())


def peak(sharing: str, batch: int, side: int, cuda: bool) -> tuple[int, int, int]:
    """Return the peak of a step in live bytes and in bytes of CUDA's allocator, and the bytes of
    gradients at its end.
    """
    workspace.ResetWorkspace()
    init, net = resnet50(cuda, sharing)
    workspace.RunNetOnce(init)
    with core.DeviceScope(core.DeviceOption(DEVICE_NUMBERS["CUDA" if cuda else "CPU"], 0)):
        workspace.FeedBlob("ns/data", torch.randn(batch, 3, side, side))
        workspace.FeedBlob("ns/label", torch.randint(0, 1000, (batch,), dtype=torch.int32))
    workspace.CreateNet(net)
    workspace.RunNet(net)
    allocated = 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        workspace.RunNet(net)
        allocated = torch.cuda.max_memory_allocated()
    most = 0
    for step in current().nets[net.Name()].steps:
        step()
        most = max(most, live_bytes())
    return most, allocated, live_bytes(gradients=True)


def memory(batch: int, side: int, cuda: bool) -> None:
    """Print the table of peak memory."""
    first = gradients = 0
    for sharing in ("none", "gradients", "all"):
        most, allocated, of_gradients = peak(sharing, batch, side, cuda)
        first, gradients = first or most, gradients or of_gradients
        saved = f"saved {(first - most) / 2**20:.1f} MiB, {100 * (first - most) / gradients:.0f} % of the gradients"
        on_gpu = f", CUDA allocator {allocated / 2**20:.1f} MiB" if cuda else ""
        print(
            f"ResNet-50, batch {batch}, side {side}, shared: {sharing}: peak {most / 2**20:.1f} "
            f"MiB{on_gpu}; {saved}"
        )
    print(f"Gradients without sharing: {gradients / 2**20:.1f} MiB")


def main() -> None:
    """Print a line for each size, or the table of memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operators", type=int, default=500)
    parser.add_argument("--sizes", default="16,1000,10000", help="values in a tensor")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument(
        "--memory", type=int, metavar="BATCH", help="measure memory, with pictures in a batch"
    )
    parser.add_argument("--side", type=int, default=224, help="of the pictures")
    parser.add_argument("--cuda", action="store_true", help="measure on a GPU")
    arguments = parser.parse_args()
    if arguments.memory:
        memory(arguments.memory, arguments.side, arguments.cuda)
        return
    torch.set_num_threads(1)
    net = net_of(arguments.operators)
    for size in map(int, arguments.sizes.split(",")):
        x, b = torch.randn(size), torch.randn(size)
        workspace.ResetWorkspace()
        workspace.FeedBlob("x", x)
        workspace.FeedBlob("b", b)
        workspace.CreateNet(net, overwrite=True)
        hand, run = fastest(
            arguments.turns,
            lambda x=x, b=b: by_hand(arguments.operators, x, b),  # type: ignore[misc]
            lambda: workspace.RunNet(net),
        )
        print(
            f"{arguments.operators} operators on {size:6} values: by hand {1e3 * hand:.3f} ms, "
            f"net {1e3 * run:.3f} ms, "
            f"ratio {run / hand:.3f}"
        )


if __name__ == "__main__":
    main()
