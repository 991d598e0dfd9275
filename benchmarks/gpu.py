#!/usr/bin/env python3
"""Check Poseidon's CUDA paths on one GPU, and measure one worker beside plain torch.

    python benchmarks/gpu.py --all                       # everything, in ten minutes, to gpu.json
    python benchmarks/gpu.py --json gpu.json
    python benchmarks/gpu.py --autocast --compiler inductor
    python benchmarks/gpu.py --device cpu --small        # the same code on small nets, without a GPU

Checks: streams, copies to pinned memory, factors, several workers on the device,
autocast, torch.compile. Speed: AlexNet, ResNet-50 and GPT-2 (124 M) on one worker
with one shard through `ps`, `hybrid` and, where there is one, `auto`, beside plain torch by turns;
medians of the rounds. The result is a table, and JSON with --json.

--all adds: the default of one GPU without a shard, codecs, memory, Caffe's nets in each precision,
whether two runs have the same bits, and the waits of a step for the device.

Needs only torch, numpy, pyzmq, msgpack, protobuf and lmdb. The exit code is 1 if a check fails,
and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment("torch", "numpy", "zmq", "msgpack", "google", "lmdb")
# torch reads it at the first product of matrices, and --deterministic needs it
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

READERS = ("cv2", "h5py", "pydot", "tqdm")
"""Packages that read or draw files.

Nothing here does, so a machine without them gets empty modules in their place.
"""
for name in READERS:
    if find_spec(name) is None:
        sys.modules[name] = MagicMock(name=name, __spec__=ModuleSpec(name, None))

import torch

from benchmarks.gpu_runs.checks import Checked, CheckFailed, run_checks
from benchmarks.gpu_runs.everything import CAFFE_NETS, SMALL_NETS, parts_of, run_everything
from benchmarks.gpu_runs.nets import device_nets
from benchmarks.gpu_runs.speed import SpeedEffort, device_name, measure_speed
from benchmarks.testbed.tables import Table, write_json
from poseidon.errors import PoseidonError

NO_GPU = "gpu.py: torch finds no CUDA GPU on this machine; run this where there is one, or with --device=cpu --small"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="where to compute (cuda)"
    )
    parser.add_argument("--small", action="store_true", help="small nets of the same kinds")
    parser.add_argument("--rounds", type=int, default=7, help="of each system (7)")
    parser.add_argument("--iterations", type=int, default=20, help="in each round (20)")
    parser.add_argument("--autocast", action="store_true", help="forward passes in bfloat16")
    parser.add_argument(
        "--compiler", default="aot_eager", help="backend of torch.compile (aot_eager)"
    )
    parser.add_argument("--all", action="store_true", help="everything; no part begins too late")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="with --all: no part begins later (9)"
    )
    parser.add_argument("--only", choices=("checks", "speed"), help="leave out the other")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    flags = parser.parse_args(arguments)
    if flags.rounds < 1 or flags.iterations < 1:
        parser.error("--rounds and --iterations must be at least 1")
    return flags


def check_table(checks: list[Checked], device: torch.device) -> Table:
    """Return the results of the checks as a table."""
    failed = sum(bool(check.problem) for check in checks)
    return Table(
        title=f"Checks on {device_name(device)}",
        head=("check", "result"),
        rows=tuple((check.name, check.problem or "good") for check in checks),
        reading=f"{len(checks) - failed} of {len(checks)} are good. Each compares with one "
        "process that trains alone.",
        facts=tuple({"check": check.name, "problem": check.problem} for check in checks),
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return the exit code."""
    flags = parse(arguments)
    if flags.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    device = torch.device(flags.device, 0) if flags.device == "cuda" else torch.device("cpu")
    report = partial(print, file=sys.stderr, flush=True)
    if flags.all:
        return run_all(flags, device, report)
    tables: list[Table] = []
    failed = False
    try:
        if flags.only != "speed":
            checks = run_checks(device, compiler=flags.compiler, report=report)
            failed = any(check.problem for check in checks)
            tables.append(check_table(checks, device))
        if flags.only != "checks":
            effort = SpeedEffort(
                rounds=flags.rounds, iterations=flags.iterations, mixed=flags.autocast
            )
            tables.append(measure_speed(device_nets(small=flags.small), device, effort, report))
    except PoseidonError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 1
    for table in tables:
        print(f"\n{table}")
    if flags.json is not None and not written(tables, flags.json):
        return 1
    return int(failed)


def run_all(flags: argparse.Namespace, device: torch.device, report: Callable[..., None]) -> int:
    """Run everything; print each table and write all of them as soon as one is there."""
    path: Path = flags.json or Path("gpu.json")
    tables: list[Table] = []
    if not written(tables, path):
        return 1

    def take(table: Table) -> None:
        tables.append(table)
        print(f"\n{table}", flush=True)
        written(tables, path)

    def checks() -> Table:
        found = run_checks(device, compiler=flags.compiler, report=report)
        if problems := [f"{check.name}: {check.problem}" for check in found if check.problem]:
            take(check_table(found, device))
            raise CheckFailed("; ".join(problems))
        return check_table(found, device)

    parts = parts_of(
        device,
        device_nets(small=flags.small),
        SMALL_NETS if flags.small else CAFFE_NETS,
        SpeedEffort(rounds=min(flags.rounds, 3), iterations=min(flags.iterations, 10)),
        checks=checks,
        report=report,
    )
    good = run_everything(device, parts, limit_s=60 * flags.minutes, report=report, on_table=take)
    print(f"\nAll of it is in {path}.", file=sys.stderr)
    return int(not good)


def written(tables: list[Table], path: Path) -> bool:
    """Write the results; return False, and say so, where that is not possible."""
    try:
        write_json(tables, path)
    except OSError as error:
        print(f"gpu.py: cannot write '{path}': {error.strerror}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
