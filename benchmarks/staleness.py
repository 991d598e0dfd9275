#!/usr/bin/env python3
"""Measure the test accuracy of cifar10_quick under bounded staleness, beside staleness 0.

    python benchmarks/staleness.py --seeds 1,2,3 --staleness 0,1,2,4

Trains on two clients of this machine with CIFAR-10 (prepare it first:
examples/cifar10/create_cifar10.sh). The rate falls to a tenth for the last fifth of the iterations:
at a constant rate the last iterate alone moves by a point or two.

How to read it: one row a seed, one column a staleness; below, the mean over seeds and its distance
from staleness 0. Runs at staleness > 0 depend on the processes' timing, so they do not repeat to
the digit.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

from poseidon.caffe.proto.definition import read_solver
from poseidon.caffe.proto.text import to_text

SOLVER = ROOT / "prototxt" / "cifar10" / "cifar10_quick_solver.prototxt"


def write_solver(folder: Path, seed: int, iterations: int) -> Path:
    """cifar10_quick's solver for so many iterations, tested at the end."""
    solver = read_solver(SOLVER)
    param = solver.param
    param.net = str(solver.resolve(param.net))
    param.max_iter = iterations
    param.random_seed = seed
    param.lr_policy = "multistep"
    param.gamma = 0.1
    param.stepvalue.append(iterations * 4 // 5)
    param.test_interval = iterations
    param.test_initialization = False
    param.snapshot = 0
    param.snapshot_after_train = False
    path = folder / f"solver_seed{seed}.prototxt"
    path.write_text(to_text(param), encoding="utf-8")
    return path


def accuracy(folder: Path, solver: Path, staleness: int) -> float:
    """Train, and read the last test score from the job's net outputs."""
    output = folder / f"{solver.stem}_s{staleness}"
    hosts = folder / "hosts"
    hosts.write_text("0 127.0.0.1 0\n1 127.0.0.1 0\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "poseidon",
        "train",
        f"--solver={solver}",
        f"--hostfile={hosts}",
    ]
    command += [
        f"--output={output}",
        f"--net_outputs={output / 'job'}",
        f"--staleness={staleness}",
    ]
    subprocess.run(
        command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    tests = (
        (output / "job.netoutputs").read_text(encoding="utf-8").split("\n\n")[1].strip().split("\n")
    )
    column = tests[0].split(",").index("accuracy")
    return float(tests[-1].split(",")[column])


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Test accuracy of cifar10_quick under bounded staleness."
    )
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3])
    parser.add_argument("--staleness", type=numbers, default=[0, 1, 2, 4])
    parser.add_argument("--iterations", type=int, default=1000)
    flags = parser.parse_args()
    folder = ROOT / "output" / "staleness"
    folder.mkdir(parents=True, exist_ok=True)
    print("seed  " + "  ".join(f"s={s:<6}" for s in flags.staleness), flush=True)
    columns: dict[int, list[float]] = {s: [] for s in flags.staleness}
    for seed in flags.seeds:
        solver = write_solver(folder, seed, flags.iterations)
        for staleness in flags.staleness:
            columns[staleness].append(accuracy(folder, solver, staleness))
        print(
            f"{seed:<6}" + "  ".join(f"{columns[s][-1]:<8.4f}" for s in flags.staleness), flush=True
        )
    means = [statistics.mean(columns[s]) for s in flags.staleness]
    print("mean  " + "  ".join(f"{mean:<8.4f}" for mean in means))
    print("diff  " + "  ".join(f"{mean - means[0]:<+8.4f}" for mean in means))


if __name__ == "__main__":
    main()
