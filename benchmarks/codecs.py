#!/usr/bin/env python3
"""Measure the processor time of each stage of a lossy exchange.

    python benchmarks/codecs.py --workers=4

How to read it: core-seconds for a GB (1e9 bytes) of float32, in chunks of 2 MiB, as `compiled /
torch`: the compiled codecs and torch's code, by turns in one run. Each number is the median over
the rounds. The columns are what a chunk passes through: `compress` on the worker that pushes it
(add what was held back, encode, hold back the rest), `average` on the shard (the codes of all
workers, for each of them), `follow` on the shard (encode the change of the value, and apply it),
`add` on a worker that receives it. `add_` in the first line is torch's sum of two chunks in place:
what the memory allows at 12 bytes an element.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import numpy as np
import torch

from ps_server import native
from ps_server.codecs.base import Coder, Key
from ps_server.codecs.registry import codec_of
from ps_server.numerics import prepare_process
from ps_server.protocol.precision import Feedback, WorkersCopy, add, as_array
from ps_server.protocol.settings import Precision

CODECS = "int8,int4,sign,topk:0.01,topk:0.1,randomk:0.01,randomk:0.1"
KEY = Key(table=0, segment=0, clock=0)
Stages = dict[str, Callable[[int], None]]
"""Each stage with the number of the round."""


def stages_of(
    spec: str, library: native.Library | None, given: Sequence[np.ndarray], workers: int
) -> Stages:
    """Return the stages of a codec on chunks of its own."""
    codec = Coder(codec_of(spec), library)
    left, own, other = (np.zeros_like(given[0]) for _ in range(3))
    pushes = [np.zeros(codec.size(left.size), np.uint8) for _ in range(workers)]
    for out, gradient in zip(pushes, given, strict=False):
        codec.compress(np.zeros_like(left), gradient, out, KEY)
    encoded = pushes[0].copy()
    return {
        "compress": lambda at: codec.compress(left, given[at % workers], encoded, KEY),
        "average": lambda at: codec.average(other, pushes, KEY),
        "follow": lambda at: codec.follow(own, given[at % workers], encoded, KEY),
        "add": lambda at: codec.add(other, pushes[at % workers], KEY),
    }


def stages_of_precision(precision: Precision, given: Sequence[np.ndarray]) -> Stages:
    """Return the stages of 16 bits; the shard's sum is not one of them."""
    feedback = Feedback(given[0].size, precision, reuse=True)
    replica = WorkersCopy(torch.zeros(given[0].size), precision)
    values = [torch.from_numpy(array) for array in given]
    other = np.zeros_like(given[0])
    return {
        "compress": lambda at: _ignore(feedback.round(given[at % len(given)])),
        "follow": lambda at: replica.follow(values[at % len(given)], 0),
        "add": lambda at: add(other, as_array(replica.change)),
    }


def _ignore(_: object) -> None:
    pass


def measure(stages: Sequence[Callable[[int], None]], rounds: int, size: int) -> list[float]:
    """Return the median core-seconds for a GB of each of these, by turns."""
    taken: list[list[float]] = [[] for _ in stages]
    for at in range(rounds):
        for stage, seconds in zip(stages, taken, strict=True):
            began_s = time.thread_time()
            stage(at)
            seconds.append((time.thread_time() - began_s) / (4 * size / 1e9))
    return [statistics.median(seconds) for seconds in taken]


def rows(flags: argparse.Namespace) -> list[str]:
    """Measure, and return the rows of the table."""
    random = np.random.default_rng(0)
    given = [random.standard_normal(flags.size, np.float32) for _ in range(flags.workers)]
    tensors = [torch.from_numpy(array.copy()) for array in given[:2]]
    (plain,) = measure([lambda _: _ignore(tensors[0].add_(tensors[-1]))], flags.rounds, flags.size)
    table = [
        f"add_ {plain:.3f}",
        "",
        "| codec | compress | average | follow | add |",
        "|---|---|---|---|---|",
    ]
    for spec in flags.codecs:
        make = partial(stages_of, spec, given=given, workers=flags.workers)
        both = [make(library=library) for library in (native.LIBRARY, None)]
        cells = []
        for name in both[0]:
            found = measure([stages[name] for stages in both], flags.rounds, flags.size)
            found = [one / flags.workers for one in found] if name == "average" else found
            cells.append(f"{found[0]:.3f} / {found[1]:.3f}")
        table.append(f"| `{spec}` | " + " | ".join(cells) + " |")
    for precision in (Precision.FLOAT16, Precision.BFLOAT16):
        stages = stages_of_precision(precision, given)
        found = measure(list(stages.values()), flags.rounds, flags.size)
        numbers = dict(zip(stages, (f"{one:.3f}" for one in found), strict=True))
        table.append(
            f"| {precision.value} | {numbers['compress']} | | {numbers['follow']} | "
            f"{numbers['add']} |"
        )
    return table


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Processor time of codecs.")
    parser.add_argument("--codecs", type=lambda text: text.split(","), default=CODECS.split(","))
    parser.add_argument("--workers", type=int, default=4, help="whose codes a shard adds")
    parser.add_argument("--size", type=int, default=512 * 1024, help="elements of a chunk")
    parser.add_argument("--rounds", type=int, default=40)
    flags = parser.parse_args(words)
    if native.LIBRARY is None:
        raise SystemExit("the codecs are not compiled: see `python -m ps_server.native`")
    prepare_process(1)
    print(f"compiled with {native.LIBRARY.level.name} / torch; core-seconds for a GB of float32")
    print("\n".join(rows(flags)))


if __name__ == "__main__":
    main()
