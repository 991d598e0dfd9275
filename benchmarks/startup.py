#!/usr/bin/env python3
"""Measure the start of a job: from the command to the end of the first step, beside torchrun.

    python benchmarks/startup.py
    python benchmarks/startup.py --rounds 9 --hostfile machinefile
    python benchmarks/startup.py --solver mine/cifar10_quick_solver.prototxt

The same small torch script is started by `torchrun --nproc_per_node=2`, where DDP over gloo joins
the workers, and by `poseidon run`: with two workers of one client, and with two clients of one
worker and one shard each, both on this machine. `--hostfile` adds a job on the hosts of a
machinefile, whose clocks must agree, with the flags of `--run_flags`. `--solver` adds `poseidon
train` of a solver.

How to read it: medians over rounds by turns, seconds. `processes` is the time from the command to
the start of rank 0's process: the launcher's imports and checks. `imports` ends at the script's
first line, `script` where its torch is imported and its net made, `join` where the workers are
connected, and `step` with the first step. `first step` is their sum, with the range of the rounds,
and `ratio` divides it by torchrun's. `CPU` is the processor time of all processes on this machine
to the end of the job, its last test included, which a busy machine changes less. Compiled files of Python are written
before the first round counts. `poseidon train` is timed to its first iteration, by its log.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

from poseidon.base.settings import inherited_environment

PHASES = ("processes", "imports", "script", "join", "step")
TRAIN_PHASES = ("processes", "step")
SCRIPT = """
import json, os, sys, time
moments = [time.time()]
ticks = int(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19])
age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
moments = [moments[0] - age_s, *moments]
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 2))
x, y = torch.randn(16, 64), torch.randn(16, 2)
moments.append(time.time())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
%s
moments.append(time.time())
model.zero_grad()
torch.nn.functional.mse_loss(model(x), y).backward()
group.step()
moments.append(time.time())
if rank == 0:
    print("moments", json.dumps(moments), flush=True)
%s
"""
OURS = """
import poseidon
group = poseidon.distribute(model, optimizer, batch_size=16)
rank = group.rank
"""
DDP = """
import torch.distributed as distributed
distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
group, rank = optimizer, distributed.get_rank()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to start a job.

    Attributes:
        name: in the table.
        argv: the command.
        trains: whether it is `poseidon train`, whose log is read.
    """

    name: str
    argv: tuple[str, ...]
    trains: bool = False


@dataclass(slots=True, kw_only=True)
class Measured:
    """What the rounds of a case took, in seconds.

    Attributes:
        phases: of each round, in the order of the case's phases.
        cpu_s: of each round.
    """

    phases: list[tuple[float, ...]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def totals(self) -> list[float]:
        """The time to the first step, of each round."""
        return [sum(phases) for phases in self.phases]


def durations(started_s: float, moments: Sequence[float]) -> tuple[float, ...]:
    """Return the length of each phase.

    Args:
        started_s: when the command was started.
        moments: when each phase ended.
    """
    edges = (started_s, *moments)
    return tuple(end - begin for begin, end in itertools.pairwise(edges))


def moments_in(lines: Iterator[tuple[float, str]], *, trains: bool) -> tuple[float, ...]:
    """Return when the phases of a job ended, from what it prints.

    Args:
        lines: each with the time when it came.
        trains: see `Case`.

    Raises:
        ValueError: the job has not said it.
    """
    starting_s = 0.0
    for came_s, line in lines:
        if not trains and line.startswith("moments "):
            return tuple(json.loads(line.removeprefix("moments ")))
        if trains and line.startswith("starting "):
            starting_s = came_s
        if trains and " Iteration 0, loss" in line:
            return starting_s, came_s
    raise ValueError("the job ended without a first step")


def run_once(case: Case, folder: Path, environment: Mapping[str, str]) -> tuple[list[float], float]:
    """Run a job to its end; return the phases to its first step and its processor seconds."""
    started_s = time.time()
    process = subprocess.Popen(
        case.argv,
        cwd=folder,
        env={**environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    assert process.stdout is not None
    lines = [(time.time(), line) for line in process.stdout]
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    try:
        moments = moments_in(iter(lines), trains=case.trains)
    except ValueError as error:
        raise SystemExit(f"{case.name}: {error}:\n{''.join(line for _, line in lines)}") from error
    return list(durations(started_s, moments)), used.ru_utime + used.ru_stime


def cases_of(folder: Path, flags: argparse.Namespace) -> list[Case]:
    """Write the scripts and return the cases."""
    (folder / "ours.py").write_text(SCRIPT % (OURS, "group.close()"), encoding="ascii")
    (folder / "ddp.py").write_text(
        SCRIPT % (DDP, "distributed.destroy_process_group()"), encoding="ascii"
    )
    (folder / "two").write_text("0 127.0.0.1 0\n1 127.0.0.1 0\n", encoding="ascii")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "ddp.py")
    poseidon = (sys.executable, "-m", "poseidon")
    run = (*poseidon, "run")
    found = [
        Case(name="torchrun, DDP", argv=torchrun),
        Case(name="run, 2 workers", argv=(*run, "--workers=2", "ours.py")),
        Case(name="run, 2 clients", argv=(*run, "--hostfile=two", "ours.py")),
    ]
    if flags.hostfile:
        name = f"run, {flags.hostfile.name}"
        there = (f"--hostfile={flags.hostfile}", *shlex.split(flags.run_flags))
        found.append(Case(name=name, argv=(*run, *there, "ours.py")))
    if flags.solver:
        train = (*poseidon, "train", f"--solver={flags.solver}", "--hostfile=two", "--max_iter=2")
        quiet = ("--test_interval=1000000", "--set", "test_initialization=false", "--display=1")
        found.append(Case(name="train, 2 clients", argv=(*train, *quiet), trains=True))
    return found


def table(measured: Mapping[str, Measured]) -> list[str]:
    """Return the lines of the table; the first case is what the others are divided by."""
    columns = "".join(f"{name:>10}" for name in PHASES)
    lines = [
        f"{'job':<18}{columns}{'first step':>12}{'range':>13}{'ratio':>7}{'CPU':>7}{'ratio':>7}"
    ]
    first = next(iter(measured.values()))
    total_s, cpu_s = statistics.median(first.totals), statistics.median(first.cpu_s)
    for name, case in measured.items():
        medians = [statistics.median(column) for column in zip(*case.phases, strict=True)]
        names = PHASES if len(medians) == len(PHASES) else TRAIN_PHASES
        cells = dict(zip(names, medians, strict=True))
        text = "".join(f"{cells[key]:>10.2f}" if key in cells else " " * 10 for key in PHASES)
        own_s, own_cpu_s = statistics.median(case.totals), statistics.median(case.cpu_s)
        span = f"{min(case.totals):.2f}-{max(case.totals):.2f}"
        lines.append(
            f"{name:<18}{text}{own_s:>12.2f}{span:>13}{own_s / total_s:>7.2f}{own_cpu_s:>7.2f}"
            f"{own_cpu_s / cpu_s:>7.2f}"
        )
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each job (5)")
    parser.add_argument("--hostfile", type=Path, help="a machinefile of two hosts")
    parser.add_argument(
        "--run_flags", default="", help="flags of the job on these hosts, such as --launcher=ssh"
    )
    parser.add_argument("--solver", type=Path, help="a solver whose data is ready")
    flags = parser.parse_args(arguments)
    for name in ("hostfile", "solver"):
        if getattr(flags, name) is not None:
            setattr(flags, name, getattr(flags, name).resolve(strict=True))
    with tempfile.TemporaryDirectory(prefix="poseidon-startup-") as name:
        folder = Path(name)
        environment = {**inherited_environment(), "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
        environment["PYTHONPATH"] = os.pathsep.join(
            path for path in (str(ROOT), environment.get("PYTHONPATH", "")) if path
        )
        cases = cases_of(folder, flags)
        measured = {case.name: Measured() for case in cases}
        for number in range(flags.rounds + 1):
            for case in cases:
                phases, cpu_s = run_once(case, folder, environment)
                print(f"round {number}: {case.name}: {sum(phases):.2f} s", file=sys.stderr)
                if number:  # round 0 compiles
                    measured[case.name].phases.append(tuple(phases))
                    measured[case.name].cpu_s.append(cpu_s)
    print("\n".join(table(measured)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
