#!/usr/bin/env python3
"""Measure the loss of cifar10_quick with each lossy codec, at equal numbers of samples, beside the bytes that it sends.

    python benchmarks/compression.py --schemes int8,sign,topk:0.01 --iterations 1000

Trains on two clients of this machine through the server with CIFAR-10 (prepare it first: examples/cifar10/create_cifar10.sh).
All runs have the same seed, images and rates. The rate falls to a tenth for the last fifth of the iterations.

How to read it: one row a scheme, one column a measured value. Loss and accuracy are those of 10,000 test images at the end;
bytes are what the plan counts for an iteration on the busiest link, and how many times fewer than without a codec.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.checkout import use_environment

use_environment()

from benchmarks.staleness import write_solver

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def train(folder: Path, solver: Path, scheme: str, workers: int) -> tuple[float, float, float]:
    """Train; return the last test loss and accuracy, and the bytes of an iteration."""
    output = folder / f"{solver.stem}_{re.sub(r'[^a-z0-9]+', '_', scheme)}"
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{rank} 127.0.0.1 0\n" for rank in range(workers)), encoding="utf-8")
    command = [sys.executable, "-m", "poseidon", "train", f"--solver={solver}", f"--hostfile={hosts}"]
    command += [
        f"--output={output}",
        f"--net_outputs={output / 'job'}",
        "--exchange=ps",
        f"--compress={scheme}",
    ]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{scheme}: {done.stderr[-2000:]}")
    tests = (output / "job.netoutputs").read_text(encoding="utf-8").split("\n\n")[1].strip().split("\n")
    last = dict(zip(tests[0].split(","), tests[-1].split(","), strict=True))
    plan = (output / "exchange_plan.txt").read_text(encoding="utf-8")
    size, unit = re.findall(r"this plan: ([\d.]+) (\w+)", plan)[0]
    return float(last["loss"]), float(last["accuracy"]), float(size) * UNITS[unit]


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss of cifar10_quick with lossy codecs.")
    parser.add_argument("--schemes", default="int8,sign,topk:0.1,topk:0.01,randomk:0.1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=1000)
    flags = parser.parse_args()
    folder = ROOT / "output" / "compression"
    folder.mkdir(parents=True, exist_ok=True)
    solver = write_solver(folder, flags.seed, flags.iterations)
    print(f"{'scheme':<16}{'loss':>8}{'accuracy':>10}{'kB':>9}{'fewer':>7}", flush=True)
    exact = 0.0
    for scheme in ("none", *flags.schemes.split(",")):
        loss, accuracy, size = train(folder, solver, scheme, flags.workers)
        exact = exact or size
        print(f"{scheme:<16}{loss:>8.4f}{accuracy:>10.4f}{size / 1e3:>9.1f}{exact / size:>7.1f}", flush=True)


if __name__ == "__main__":
    main()
