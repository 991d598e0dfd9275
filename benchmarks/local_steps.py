#!/usr/bin/env python3
"""Measure the evaluation loss of a small transformer under local steps, beside synchronous
training.

    python benchmarks/local_steps.py --steps 800 --seeds 1

Trains on the bytes of Python's own library with three workers of this machine, by AdamW with a
cosine schedule. All ways train on equally many records with the same inner rate. Each way is a job
of `poseidon run` whose script is this file.

How to read it: one row a way. The loss is measured on text that was not trained on, in nats a byte,
with its distance from the loss of synchronous training. The bytes are one worker's, both
directions, as a part of the bytes of synchronous training; the first values are not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import torch
from torch import Tensor, nn

import poseidon
from poseidon.observe.metrics.job_statistics import read_statistics

CONTEXT, BATCH, WORKERS = 48, 8, 3
CORPUS_BYTES = 2_000_000
HELD_OUT = 20
"""Each 20th piece of the text is for evaluation."""


@dataclass(frozen=True)
class Way:
    """A way to train: its name in the table, and the flags of `poseidon run`."""

    name: str
    flags: tuple[str, ...] = ()


BMUF = ("--local_steps=outer_lr=1", "--local_steps=outer_momentum=0.667")
WAYS = (
    Way("synchronous"),
    Way("H=8, BMUF", ("--local_steps=8", *BMUF)),
    Way("H=32, BMUF", ("--local_steps=32", *BMUF)),
    Way("H=32, BMUF, float16", ("--local_steps=32", *BMUF, "--wire_precision=float16")),
    Way("H=32, BMUF, int8", ("--local_steps=32", *BMUF, "--compress=int8")),
    Way("H=32, BMUF, 4 fragments", ("--local_steps=32", *BMUF, "--local_steps=fragments=4")),
    Way(
        "H=32, BMUF, 4 fragments, delay 4",
        ("--local_steps=32", *BMUF, "--local_steps=fragments=4", "--local_steps=delay=4"),
    ),
    Way("H=8, DiLoCo", ("--local_steps=8",)),
    Way("H=32, DiLoCo", ("--local_steps=32",)),
    Way("H=32, average", ("--local_steps=32,outer_lr=1,outer_momentum=0")),
)


def corpus() -> tuple[Tensor, Tensor]:
    """Return bytes to train on, and bytes to evaluate on."""
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))
    content = b"".join(path.read_bytes() for path in files)[:CORPUS_BYTES]
    pieces = torch.frombuffer(bytearray(content), dtype=torch.uint8).long().split(4096)
    train = torch.cat([piece for index, piece in enumerate(pieces) if index % HELD_OUT])
    return train, torch.cat(pieces[::HELD_OUT])


class Transformer(nn.Module):
    """A transformer that predicts the next byte after each of CONTEXT bytes."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.place = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.next = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x_BT: Tensor) -> Tensor:
        h = self.blocks(self.byte(x_BT) + self.place, mask=self.mask, is_causal=True)
        scores: Tensor = self.next(self.norm(h))
        return scores


def loss_at(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    rows = text[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)]
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def script(flags: argparse.Namespace) -> None:
    """Train as one worker of a job; rank 0 writes the evaluation loss."""
    train, test = corpus()
    torch.manual_seed(flags.seed)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / flags.steps)),
    )
    with poseidon.distribute(model, optimizer, clip=1.0) as group:
        starts = torch.Generator().manual_seed(1000 * flags.seed + group.rank)
        for _ in range(flags.steps):
            optimizer.zero_grad()
            loss_at(
                model, train, torch.randint(len(train) - CONTEXT, (BATCH,), generator=starts)
            ).backward()
            group.step()
            schedule.step()
    if group.rank == 0:
        with torch.no_grad():
            losses = [
                loss_at(model, test, part)
                for part in torch.arange(0, len(test) - CONTEXT - 1, 24).split(256)
            ]
        Path(flags.result).write_text(str(float(torch.stack(losses).mean())), encoding="utf-8")


def measure(way: Way, seed: int, flags: argparse.Namespace, folder: Path) -> tuple[float, int]:
    """Run a job. Return its evaluation loss, and the bytes of worker 0."""
    output = folder / f"{way.name.replace(', ', '_').replace('=', '')}_{seed}"
    hosts, result = folder / "hosts", folder / "result"
    hosts.write_text(
        "".join(f"{client} 127.0.0.1 0\n" for client in range(WORKERS)), encoding="utf-8"
    )
    command = [sys.executable, "-m", "poseidon", "run", f"--hostfile={hosts}", f"--output={output}"]
    command += [
        "--threads=1",
        "--exchange=ps",
        *way.flags,
        __file__,
        "--script",
        f"--steps={flags.steps}",
    ]
    command += [f"--seed={seed}", f"--lr={flags.lr}", f"--result={result}"]
    subprocess.run(
        command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    worker = read_statistics(output / "statistics.json").workers[0]
    moved = sum((tensor.bytes_out or 0) + (tensor.bytes_in or 0) for tensor in worker.tensors)
    return float(result.read_text(encoding="utf-8")), moved


def compare(flags: argparse.Namespace) -> None:
    """Run all ways for each seed, and print the table of means."""
    folder = ROOT / "output" / "local_steps"
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[tuple[float, int]]] = {way.name: [] for way in WAYS}
    for seed in flags.seeds:
        for way in WAYS:
            loss, moved = measure(way, seed, flags, folder)
            found[way.name].append((loss, moved))
            print(f"seed {seed}, {way.name}: loss {loss:.4f}, {moved / 1e6:.1f} MB", flush=True)
    print("\n| way | evaluation loss | to synchronous | bytes |\n|---|---|---|---|")
    means = {
        name: tuple(statistics.fmean(column) for column in zip(*runs, strict=True))
        for name, runs in found.items()
    }
    loss, moved = means["synchronous"]
    for name, (own_loss, own_moved) in means.items():
        print(
            f"| {name} | {own_loss:.4f} | {own_loss / loss - 1:+.1%} | 1/{moved / own_moved:.0f} |"
        )


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Evaluation loss of a small transformer under local steps."
    )
    parser.add_argument("--steps", type=int, default=800, help="of each worker")
    parser.add_argument("--seeds", type=numbers, default=[1])
    parser.add_argument("--lr", type=float, default=3e-3, help="largest rate of AdamW")
    parser.add_argument("--script", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    (script if flags.script else compare)(flags)


if __name__ == "__main__":
    main()
