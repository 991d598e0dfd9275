#!/usr/bin/env python3
"""Measure the loss of small real trainings with each lossy scheme at equal samples, beside its
bytes and DDP's hooks.

    python benchmarks/compression.py --data=FOLDER --trainings quick,transformer --ways int8,powersgd:4:int8 --seeds 1,2

FOLDER holds the published archives of CIFAR-10 (cifar-10-binary.tar.bz2) and MNIST
(train-images-idx3-ubyte.gz, ...), at any depth. A way is a text of `--compress`, `none`, `float16`,
`H=8+int8` for local steps, or a hook of torch's DDP over gloo: `ddp`, `ddp fp16`, `ddp powersgd:4`.
Local steps have BMUF's outer rule; `H=8:0.7:0.9+int8` has the outer rate 0.7 and the outer momentum
0.9. All ways of a seed have the same initial weights, batches and rates. With different `--steps`
use a different `--cache`: it keeps the results by training, way and seed.

How to read it: one row a way, one pair of columns a training. The loss is measured on test data at
the end, the median over seeds, with its distance from the same seed without compression (the
median, and the range over seeds). Bytes are worker 0's, both directions, as how many times fewer
than without compression; the first values are not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import poseidon
from benchmarks.small_trainings import TRAININGS, WORKERS, Task, load
from benchmarks.testbed.hooks import Hook, HookKind, attach
from poseidon.errors import unknown
from poseidon.observe.metrics.job_statistics import read_statistics
from poseidon.observe.plan.scenario import low_rank_elements

NONE, DDP = "none", "ddp"
WAYS = (
    "none,float16,int8,int4,topk:0.1,topk:0.01,topk:0.01/int8,sign,sign/int8,powersgd:4,powersgd:4:int8,powersgd:2:int8,"
    "powersgd:1:int8,H=8,H=8+int8,H=8+int4,H=32+int8,ddp,ddp fp16,ddp powersgd:4,ddp "
    "powersgd:2,ddp powersgd:1"
)
LOCAL_STEPS = re.compile(r"H=(\d+)(?::([\d.]+):([\d.]+))?(?:\+(.+))?")


def flags_of(way: str) -> list[str]:
    """Return the flags of `poseidon run` for a way that does not use DDP."""
    if local := LOCAL_STEPS.fullmatch(way):
        steps, rate, momentum, codec = local.groups()
        momentum = momentum or f"{1 - 1 / WORKERS:g}"
        rounds = f"--local_steps={steps},outer_lr={rate or 1},outer_momentum={momentum}"
        return [rounds, *(flags_of(codec) if codec else [])]
    if way in ("float16", "bfloat16"):
        return [f"--wire_precision={way}"]
    return [] if way == NONE else [f"--compress={way}"]


def script(flags: argparse.Namespace) -> None:
    """Train as one worker of a job; rank 0 writes the test loss."""
    torch.set_num_threads(1)
    samples = load(flags.training, flags.data, flags.cache)
    if flags.way.startswith(DDP):
        _train_ddp(flags, Task(flags.training, samples, flags.seed, flags.rank))
        return
    task = Task(flags.training, samples, flags.seed, poseidon.this_worker().rank)
    training = task.training
    how: poseidon.SGD | torch.optim.Optimizer
    if training.momentum is None:
        how = torch.optim.AdamW(
            task.module.parameters(), lr=training.rate, weight_decay=training.decay
        )
    else:
        how = poseidon.SGD(
            lr=lambda step: training.rate_at(step, flags.steps),
            momentum=training.momentum,
            weight_decay=training.decay,
        )
    with poseidon.distribute(task.module, how) as group:
        for step in range(flags.steps):
            if isinstance(how, torch.optim.Optimizer):
                how.param_groups[0]["lr"] = training.rate_at(step, flags.steps)
            task.module.zero_grad()
            task.loss(task.module).backward()
            group.step()
        group.settle()
        if group.rank == 0:
            flags.result.write_text(json.dumps([task.test()]), encoding="utf-8")
        group.mean(0.0)  # the others wait until rank 0 has tested


def _train_ddp(flags: argparse.Namespace, task: Task) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{flags.rendezvous}", rank=flags.rank, world_size=WORKERS
    )
    training, net = task.training, DistributedDataParallel(task.module)
    _, _, hook = flags.way.partition(" ")
    after = attach(net, Hook.parse(hook)) if hook else lambda: None
    optimizer: torch.optim.Optimizer
    if training.momentum is None:
        optimizer = torch.optim.AdamW(
            net.parameters(), lr=training.rate, weight_decay=training.decay
        )
    else:
        optimizer = torch.optim.SGD(
            net.parameters(),
            lr=training.rate,
            momentum=training.momentum,
            weight_decay=training.decay,
        )
    for step in range(flags.steps):
        optimizer.param_groups[0]["lr"] = training.rate_at(step, flags.steps)
        optimizer.zero_grad()
        task.loss(net).backward()
        optimizer.step()
        after()
    if flags.rank == 0:
        shapes = [tuple(parameter.shape) for parameter in task.module.parameters()]
        flags.result.write_text(
            json.dumps([task.test(), ddp_bytes(hook, shapes, flags.steps)]), encoding="utf-8"
        )
    distributed.barrier()
    distributed.destroy_process_group()


def ddp_bytes(hook: str, shapes: list[tuple[int, ...]], steps: int) -> float:
    """Return the bytes of a worker's all-reduces, sent and received, over a ring of `WORKERS`."""
    elements = [math.prod(shape) for shape in shapes]
    ring = 4 * (WORKERS - 1) / WORKERS * steps
    if not hook:
        return ring * 4 * sum(elements)
    parsed = Hook.parse(hook)
    if parsed.kind is HookKind.FP16:
        return ring * 2 * sum(elements)
    return ring * 4 * sum(low_rank_elements(shape, parsed.number) for shape in shapes)


def measure(training: str, way: str, seed: int, flags: argparse.Namespace) -> tuple[float, float]:
    """Run a job. Return its test loss, and the bytes of worker 0."""
    steps = flags.steps or TRAININGS[training].steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = folder / "result"
        own = [
            __file__,
            "--script",
            f"--training={training}",
            f"--way={way}",
            f"--seed={seed}",
            f"--steps={steps}",
        ]
        own += [f"--data={flags.data}", f"--cache={flags.cache}", f"--result={result}"]
        if way.startswith(DDP):
            own += [f"--rendezvous={folder / 'rendezvous'}"]
            workers = [
                subprocess.Popen(
                    [sys.executable, *own, f"--rank={rank}"],
                    cwd=ROOT,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for rank in range(WORKERS)
            ]
            for worker in workers:
                _, error = worker.communicate()
                if worker.returncode:
                    raise SystemExit(f"{training}, {way}: {error[-2000:]}")
            loss, moved = json.loads(result.read_text(encoding="utf-8"))
            return loss, moved
        (folder / "hosts").write_text(
            "".join(f"{client} 127.0.0.1 0\n" for client in range(WORKERS)), encoding="utf-8"
        )
        command = [
            sys.executable,
            "-m",
            "poseidon",
            "run",
            f"--hostfile={folder / 'hosts'}",
            "--exchange=ps",
        ]
        command += [f"--output={folder / 'job'}", "--threads=1", *flags_of(way), *own]
        done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{training}, {way}: {done.stderr[-2000:]}")
        worker0 = read_statistics(folder / "job" / "statistics.json").workers[0]
        moved = sum((tensor.bytes_out or 0) + (tensor.bytes_in or 0) for tensor in worker0.tensors)
        (loss,) = json.loads(result.read_text(encoding="utf-8"))
        return loss, moved


Found = dict[tuple[str, str, int], tuple[float, float]]


def table(found: Found, trainings: list[str], ways: list[str]) -> list[str]:
    """Return the rows of the table."""
    head = (
        "| way | " + " | ".join(f"{training} | to {NONE} | fewer" for training in trainings) + " |"
    )
    rows = [head, "|" + "---|" * (1 + 3 * len(trainings))]
    for way in ways:
        cells = [way if way.startswith((DDP, NONE)) else f"`{way}`"]
        for training in trainings:
            cells += _cells(found, training, way)
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _cells(found: Found, training: str, way: str) -> list[str]:
    exact = DDP if way.startswith(DDP) else NONE
    seeds = [
        seed
        for name, own, seed in found
        if (name, own) == (training, way) and (training, exact, seed) in found
    ]
    if not seeds:
        return ["", "", ""]
    losses = [found[training, way, seed][0] for seed in seeds]
    changes = [found[training, way, seed][0] / found[training, NONE, seed][0] - 1 for seed in seeds]
    fewer = statistics.median(
        found[training, exact, seed][1] / found[training, way, seed][1] for seed in seeds
    )
    change = f"{statistics.median(changes):+.1%}"
    if len(seeds) > 1:
        change += f" ({min(changes):+.1%} to {max(changes):+.1%})"
    return [f"{statistics.median(losses):.4f}", change, f"{fewer:.1f}"]


def compare(flags: argparse.Namespace) -> None:
    """Measure all ways for each seed, and print the table.

    Results are kept in the cache and not measured again.
    """
    flags.cache.mkdir(parents=True, exist_ok=True)
    log = flags.cache / "results.jsonl"
    found: Found = {}
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        training, way, seed, loss, moved = json.loads(line)
        found[training, way, seed] = loss, moved
    for training in flags.trainings:
        # unpacks once, before workers do it at the same time
        load(training, flags.data, flags.cache)
    for seed in flags.seeds:
        for training in flags.trainings:
            for way in flags.ways:
                if (training, way, seed) in found:
                    continue
                began_s = time.monotonic()
                loss, moved = found[training, way, seed] = measure(training, way, seed, flags)
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([training, way, seed, loss, moved]) + "\n")
                took_s = time.monotonic() - began_s
                print(
                    f"{training}, seed {seed}, {way}: {loss:.4f}, {moved / 1e6:.1f} MB, "
                    f"{took_s:.0f} s",
                    flush=True,
                )
    print("\n" + "\n".join(table(found, flags.trainings, flags.ways)))


def texts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def trainings(text: str) -> list[str]:
    for name in (names := texts(text)):
        if name not in TRAININGS:
            raise argparse.ArgumentTypeError(unknown("training", name, TRAININGS))
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss of small trainings with lossy schemes.")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of the archives of CIFAR-10 and MNIST"
    )
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "output" / "compression", help="unpacked data, results"
    )
    parser.add_argument("--trainings", type=trainings, default=list(TRAININGS))
    parser.add_argument("--ways", type=texts, default=texts(WAYS))
    parser.add_argument(
        "--seeds", type=lambda text: [int(part) for part in texts(text)], default=[1]
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="of each worker; 0: as many as the training has"
    )
    parser.add_argument("--script", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--training", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    (script if flags.script else compare)(flags)


if __name__ == "__main__":
    main()
