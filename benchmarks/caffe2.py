#!/usr/bin/env python3
"""Compare the running of a Caffe2 net with the same calls to torch, written by hand.

    python benchmarks/caffe2.py [--operators 500] [--sizes 16,1000,10000] [--turns 200]

Net and calls run by turns on one thread; the ratio is that of the fastest turns. Both keep all results until the next turn.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.checkout import use_environment

use_environment()

import torch

from poseidon.caffe2 import core, workspace


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


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operators", type=int, default=500)
    parser.add_argument("--sizes", default="16,1000,10000", help="values in a tensor")
    parser.add_argument("--turns", type=int, default=200)
    arguments = parser.parse_args()
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
            f"{arguments.operators} operators on {size:6} values: by hand {1e3 * hand:.3f} ms, net {1e3 * run:.3f} ms, "
            f"ratio {run / hand:.3f}"
        )


if __name__ == "__main__":
    main()
