#!/usr/bin/env python3
"""Show that bits depend on the number of virtual workers alone, and what virtual workers cost.

    python benchmarks/virtual_workers.py --only bits
    python benchmarks/virtual_workers.py --only cost
    sudo python benchmarks/virtual_workers.py --only balance

`bits` trains each case on several numbers of processes of this machine, by `poseidon train` and
`poseidon run`, and compares the SHA-256 of the weights; it also takes a job of 4 processes on 2 and
then on 3. It ends with code 1 where they differ. `cost` trains one process with 4 virtual workers
beside one process with the whole batch, by turns: the medians of seconds an iteration, and the
largest memory. `balance` gives processes quotas of processor, as 1 : 0.5 : 0.25, and prints the speed
of all together, from iteration 30 to 60, beside the sum of their own: with equal numbers of virtual
workers, and with `--balance=auto`. It compares the weights of both. A quota needs root and control
groups.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import numpy as np
import psutil

from benchmarks.chaos_runs.definitions import TRANSFORMER
from benchmarks.testbed.measurement_lock import alone
from poseidon.caffe.data.cursor import open_writer
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_datum

POSEIDON = [sys.executable, "-m", "poseidon"]
TIMEOUT_S = 600
TWELVE = (1, 2, 3, 4, 6, 12)
SIX = TWELVE[:-1]
QUOTAS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 100_000
BALANCES = {"1 : 0.5": ((0.8, 0.4), 12), "1 : 0.5 : 0.25": ((0.8, 0.4, 0.2), 28)}
"""The quotas of the processes of a job of `balance`, and its virtual workers."""
SHOWN = re.compile(r"Iteration (\d+), loss.* time: ([0-9.]+)")
SOLVER = """
net: "{net}"
base_lr: 0.001
lr_policy: "fixed"
momentum: 0.9
weight_decay: 0.004
max_iter: {iterations}
snapshot: {snapshot}
display: 0
random_seed: 7
{more}
"""
DATA = """
name: "drawn"
layer {{ name: "data" type: "Data" top: "data" top: "label"
  transform_param {{ mirror: true }}
  data_param {{ source: "{records}" batch_size: {batch} backend: LMDB
    shared_file_system: true }} }}
"""
CONVOLUTION = """
layer {{ name: "conv{n}" type: "Convolution" bottom: "{bottom}" top: "conv{n}"
  convolution_param {{ num_output: {outputs} pad: 2 kernel_size: 5
    weight_filler {{ type: "gaussian" std: {std} }} }} }}
{norm}
layer {{ name: "relu{n}" type: "ReLU" bottom: "conv{n}" top: "conv{n}" }}
layer {{ name: "pool{n}" type: "Pooling" bottom: "conv{n}" top: "pool{n}"
  pooling_param {{ pool: MAX kernel_size: 3 stride: 2 }} }}
"""
NORM = """
layer {{ name: "norm{n}" type: "BatchNorm" bottom: "conv{n}" top: "conv{n}" }}
layer {{ name: "scale{n}" type: "Scale" bottom: "conv{n}" top: "conv{n}"
  scale_param {{ bias_term: true }} }}
"""
TOP = """
layer { name: "ip1" type: "InnerProduct" bottom: "pool3" top: "ip1"
  inner_product_param { num_output: 64 weight_filler { type: "gaussian" std: 0.1 } } }
layer { name: "drop" type: "Dropout" bottom: "ip1" top: "ip1" dropout_param { dropout_ratio: 0.4 } }
layer { name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2"
  inner_product_param { num_output: 10 weight_filler { type: "gaussian" std: 0.1 } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "loss" }
"""
SCRIPT = (
    TRANSFORMER % 400
    + """
with poseidon.distribute(net, optimizer, batch_size=4, clip=1.0) as group:
    while group.steps < int(sys.argv[1]):
        for x, y in group.loader(data, batch_size=4):
            nn.functional.cross_entropy(net(x), y).backward()
            group.step()
            if group.steps == int(sys.argv[1]):
                break
    group.settle()
    if group.rank == 0:
        weights = b"".join(t.detach().numpy().tobytes() for t in net.state_dict().values())
        print("sha256", hashlib.sha256(weights).hexdigest(), flush=True)
"""
)


RECORDS = 500


@cache
def records() -> Path:
    """Return a database of drawn pictures, which is removed at the end of the process."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    draw = np.random.default_rng(1)
    writer = open_writer(folder / "records", Backend.LMDB)
    for number in range(RECORDS):
        picture = draw.integers(0, 256, (3, 32, 32), np.uint8)
        writer.put(b"%05d" % number, encode_datum(picture, number % 10))
    writer.close()
    return folder / "records"


def net(*, batch: int, norm: bool = False) -> str:
    """Return a net like cifar10_quick, with dropout."""
    text = DATA.format(batch=batch, records=records())
    bottom = "data"
    for n, (outputs, std) in enumerate([(32, 0.0001), (32, 0.01), (64, 0.01)], start=1):
        text += CONVOLUTION.format(
            n=n, bottom=bottom, outputs=outputs, std=std, norm=NORM.format(n=n) if norm else ""
        )
        bottom = f"pool{n}"
    return text + TOP


@dataclass(frozen=True)
class Case:
    """One job of `bits`: its net (None: the script), number of virtual workers and flags."""

    name: str
    norm: bool | None
    virtual_workers: int
    processes: Sequence[int]
    flags: Sequence[str]
    more: str = ""


CASES = [
    *(
        Case(f"{name}, {exchange}", norm, 12, TWELVE, [f"--exchange={exchange}"])
        for name, norm in [("quick", False), ("BatchNorm", True), ("transformer, AdamW", None)]
        for exchange in ("ps", "hybrid", "svb", "allreduce")
    ),
    Case("quick, clip_gradients", False, 12, TWELVE, [], "clip_gradients: 0.5"),
    Case("quick, int8", False, 12, TWELVE, ["--exchange=ps", "--compress=int8"]),
    Case("quick, powersgd", False, 12, TWELVE, ["--exchange=ps", "--compress=powersgd:2"]),
    Case("BatchNorm, local steps", True, 12, SIX, ["--local_steps=3"]),
    Case(
        "quick, streamed local steps",
        False,
        12,
        SIX,
        ["--exchange=ps", "--local_steps=3,fragments=2,delay=1"],
        'type: "Adam" momentum2: 0.99',
    ),
    Case("transformer, local steps", None, 12, SIX, ["--local_steps=3", "--exchange=ps"]),
    Case("BatchNorm, V = 16", True, 16, (1, 2, 4, 8), []),
    Case("BatchNorm, V = 7", True, 7, (1, 2, 3), []),
]


def run(words: Sequence[str], folder: Path) -> str:
    """Run a job in its folder, one thread a worker. Return what it printed.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(
        [*POSEIDON, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"poseidon {' '.join(words)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout + done.stderr


def machinefile(folder: Path, processes: int) -> Path:
    """Write the machinefile of so many clients on this machine."""
    path = folder / f"clients_{processes}"
    lines = (f"{client} 127.0.0.1 0\n" for client in range(processes))
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_solver(folder: Path, text: str, iterations: int, snapshot: int, more: str = "") -> None:
    """Write net.prototxt and solver.prototxt."""
    (folder / "net.prototxt").write_text(text, encoding="utf-8")
    solver = SOLVER.format(net="net.prototxt", iterations=iterations, snapshot=snapshot, more=more)
    (folder / "solver.prototxt").write_text(solver, encoding="utf-8")


def weights(case: Case, processes: int, iterations: int) -> str:
    """Train a case on so many processes. Return the SHA-256 of its weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = [
            f"--hostfile={machinefile(folder, processes)}",
            f"--virtual_workers={case.virtual_workers}",
            *case.flags,
        ]
        if case.norm is None:
            (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
            printed = run(["run", *flags, "train.py", str(iterations)], folder)
            found = re.search(r"sha256 ([0-9a-f]{64})", printed)
            if found is None:
                raise SystemExit(f"the script printed no sha256:\n{printed[-3000:]}")
            return found[1]
        write_solver(folder, net(batch=4, norm=case.norm), iterations, iterations, case.more)
        run(["train", "--solver=solver.prototxt", "--output=out", *flags], folder)
        return digest(folder / "out", iterations)


def digest(output: Path, iteration: int) -> str:
    """Return the SHA-256 of the weights that a job has written after an iteration."""
    (path,) = output.glob(f"*_iter_{iteration}.caffemodel")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def bits(iterations: int, only: str) -> bool:
    """Print the SHA-256 of each case by number of processes. Return whether they are equal."""
    equal = True
    for case in [case for case in CASES if only in case.name]:
        found = {count: weights(case, count, iterations) for count in case.processes}
        same = len(set(found.values())) == 1
        equal = equal and same
        counts = " ".join(map(str, case.processes))
        print(f"{case.name:<32} V={case.virtual_workers:<3} {counts:<16}", end=" ")
        print(next(iter(found.values()))[:16] if same else f"DIFFERENT {found}", flush=True)
    return equal


def moved(iterations: int, flags: Sequence[str] = ()) -> bool:
    """Train on 4 processes, on 2 from its snapshot, then on 3. Return whether the SHA-256 equals an
    uninterrupted run's.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_solver(folder, net(batch=4, norm=True), 3 * iterations, iterations)
        ends = []
        for output, parts in {"whole": [4], "parts": [4, 2, 3]}.items():
            for number, processes in enumerate(parts, start=1):
                last = 3 * iterations if len(parts) == 1 else number * iterations
                words = [
                    "train",
                    "--solver=solver.prototxt",
                    f"--hostfile={machinefile(folder, processes)}",
                    f"--output={output}_{number}",
                    f"--max_iter={last}",
                    *flags,
                ]
                before = f"{output}_{number - 1}"
                words.append("--virtual_workers=12" if number == 1 else f"--snapshot={before}")
                run(words, folder)
            ends.append(digest(folder / f"{output}_{len(parts)}", last))
        same = ends[0] == ends[1]
        print(f"{'4 processes, resumed on 2, on 3':<32} V=12  {' '.join(flags):<16}", end=" ")
        print(ends[0][:16] if same else f"DIFFERENT {ends}", flush=True)
        return same


def cost(rounds: int) -> None:
    """Print one process with four virtual workers beside one with the whole batch, by turns."""
    kinds = {"one batch of 64": (64, 1), "4 virtual workers of 16": (16, 4)}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, (batch, count) in kinds.items():
            found[kind].append(_timed(batch, count))
    print(f"{'one process':<26} {'ms an iteration':>16} {'memory MB':>10}")
    for kind, pairs in found.items():
        seconds, memory = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{kind:<26} {1000 * seconds:>16.1f} {memory / 1e6:>10.0f}")


def _timed(batch: int, count: int) -> tuple[float, float]:
    """Return the seconds of an iteration, and the largest memory of the worker."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_solver(folder, net(batch=batch), 60, 60)
        words = ["train", "--solver=solver.prototxt", "--output=out", "--set", "display=10"]
        words += ["--threads=1", f"--virtual_workers={count}"]
        memory = 0
        times = []
        for job, line in _lines(words, folder):
            if found := SHOWN.search(line):
                times.append((int(found[1]), float(found[2])))
                children = psutil.Process(job).children(recursive=True)
                memory = max([memory, *(child.memory_info().rss for child in children)])
        (first, began), (last, ended) = times[1], times[-1]
        return (ended - began) / (last - first), memory


def _lines(words: Sequence[str], folder: Path) -> Iterator[tuple[int, str]]:
    """Run a job in its folder. Yield its process id with each line that it prints."""
    with subprocess.Popen(
        [*POSEIDON, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            yield job.pid, line


@contextmanager
def quota(part: float) -> Iterator[Path]:
    """Make a control group with a part of a processor. Yield the file of its processes."""
    group = QUOTAS / f"poseidon-virtual-{os.getpid()}-{int(1000 * part)}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(part * PERIOD_US)))
        yield group / "cgroup.procs"
    finally:
        while (group / "cgroup.procs").read_text():
            time.sleep(0.1)
        group.rmdir()


def balance(rounds: int, iterations: int) -> bool:
    """Print the speed of processes with unequal quotas beside the sum of their own, and the SHA-256
    of their weights. Return whether these are equal.
    """
    equal = True
    print("speed of processes with quotas of processor, as a part of the sum of their own")
    for name, (parts, count) in BALANCES.items():
        found: dict[str, list[float]] = {}
        bits: set[str] = set()
        for _ in range(rounds):
            total = sum(2 / _limited((part,), 2, iterations, [])[0] for part in parts)
            for kind in ("equal", "auto"):
                flags = ["--balance=auto"] if kind == "auto" else []
                seconds, digest_ = _limited(parts, count, iterations, flags)
                found.setdefault(kind, []).append(count / seconds / total)
                bits.add(digest_)
        medians = ", ".join(f"{kind} {statistics.median(of):.2f}" for kind, of in found.items())
        same = bits.pop()[:16] if len(bits) == 1 else "DIFFERENT"
        equal = equal and same != "DIFFERENT"
        print(f"{name:<16} V={count:<3} {medians:<24} {same}", flush=True)
    return equal


def _limited(
    parts: Sequence[float], count: int, iterations: int, flags: Sequence[str]
) -> tuple[float, str]:
    """Train a job whose workers have quotas. Return the seconds of an iteration in its second half,
    and the SHA-256 of its weights.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as groups:
        folder = Path(name)
        write_solver(folder, net(batch=16), iterations, iterations)
        words = ["train", "--solver=solver.prototxt", "--output=out", "--set", "display=5"]
        words += [f"--virtual_workers={count}", "--exchange=ps", "--max_restarts=3", *flags]
        words.append(f"--hostfile={machinefile(folder, len(parts))}")
        files = [groups.enter_context(quota(part)) for part in parts]
        times, limited = [], False
        for job, line in _lines(words, folder):
            limited = limited or _limit(job, files)
            if found := SHOWN.search(line):
                times.append((int(found[1]), time.monotonic()))
        half = [one for one in times if one[0] >= iterations // 2]
        seconds = (half[-1][1] - half[0][1]) / (half[-1][0] - half[0][0])
        return seconds, digest(folder / "out", iterations)


def _limit(job: int, files: Sequence[Path]) -> bool:
    """Put the workers of a job into the control groups, once they have started."""
    workers = {}
    for process in psutil.Process(job).children(recursive=True):
        words = " ".join(process.cmdline())
        if "poseidon.engine.process" in words:
            workers[process.pid] = process
    if len(workers) < len(files):
        return False
    for pid, file in zip(sorted(workers), files, strict=False):
        file.write_text(str(pid))
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("bits", "cost", "balance"), help="one part")
    parser.add_argument("--case", default="", help="cases of `bits` with this in their name")
    parser.add_argument("--iterations", type=int, default=4, help="of a job of `bits` (4)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each job (3)")
    flags = parser.parse_args(arguments)
    equal = True
    if flags.only in (None, "bits"):
        equal = bits(flags.iterations, flags.case)
        for more in ((), ("--local_steps=3",)) if not flags.case else ():
            equal = moved(flags.iterations, more) and equal
    if flags.only in (None, "cost"):
        with alone(print):
            cost(flags.rounds)
    if flags.only in (None, "balance"):
        with alone(print):
            equal = balance(flags.rounds, 60) and equal
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
