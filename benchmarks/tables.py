#!/usr/bin/env python3
"""Count the bytes of a row table in a step, and the memory of a job with a large table.

    python benchmarks/tables.py
    python benchmarks/tables.py --gigabytes 0.5 --markdown tables.md

Two parts, both on this machine, as jobs of `poseidon run` with two workers and two dedicated
shards:

* bytes: a table of 10 M x 16 with Adam. Each worker looks up 32,768 random rows a step.
* memory: a table of 16 columns with SGD, of so many gigabytes, whose rows are all changed once, in
  steps of 262,144 rows a worker.

How to read it: `out` and `in` are bytes of a worker in a step by its counter of sent and received
messages, with headers, beside U (4 + 4 d) for the U distinct rows of its batches. `ratio` is at
most 1.1. `a worker` is the largest resident memory of a worker's process, with Python and torch;
`a shard` is a shard's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

from poseidon.base.settings import inherited_environment

DIM = 16
ROWS = 10_000_000
LOOKUPS = 32_768
STEPS = 20
PIECE = 262_144
MACHINES = """\
0 127.0.0.1 0 role=worker
1 127.0.0.1 0 role=worker
2 127.0.0.1 0 role=server
3 127.0.0.1 0 role=server
"""
SCRIPT = """
import json, resource, sys, time
import torch, poseidon
from poseidon.torch import distribute

part, rows, dim, size, steps = sys.argv[1], *map(int, sys.argv[2:])
rule = poseidon.Adam(lr=1e-3) if part == "bytes" else poseidon.SGD(lr=1e-3)
table = poseidon.Table(rows, dim, rule=rule, init="uniform", scale=0.01)
group = poseidon.distribute(table, poseidon.SGD(lr=1e-3))
draw = torch.Generator().manual_seed(group.rank)

def batch(step):
    if part == "bytes":
        return torch.randint(rows, (size,), generator=draw)
    first = (step * group.size + group.rank) * size
    return torch.arange(first, first + size) % rows

distinct, following = 0, batch(0)
began_s = time.monotonic()
for step in range(steps):
    indices, following = following, batch(step + 1)
    table(indices).square().mean().backward()
    if step + 1 < steps:
        group.prefetch(table, following)
    group.step()
    distinct += len(torch.unique(indices))
with torch.no_grad():
    table(torch.zeros(0, dtype=torch.int64))  # all pushes have come
seconds = time.monotonic() - began_s
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
found = group.gather([distinct, peak, seconds])
if group.rank == 0:
    print(json.dumps(found), flush=True)
group.close()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What a worker has done in all steps.

    Attributes:
        distinct: distinct rows of its batches.
        peak: most resident bytes of its process.
        seconds: from the first step to the last.
        bytes_out: sent for the table.
        bytes_in: received for it.
    """

    distinct: int
    peak: int
    seconds: float
    bytes_out: int
    bytes_in: int


def run(part: str, rows: int, size: int, steps: int) -> tuple[list[Worker], list[int]]:
    """Run a job. Return its workers, and the most resident bytes of each shard."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script, machines = folder / "train.py", folder / "machines"
        script.write_text(SCRIPT, encoding="utf-8")
        machines.write_text(MACHINES, encoding="utf-8")
        command = [sys.executable, "-m", "poseidon", "run", f"--hostfile={machines}"]
        command += [f"--output={folder / 'job'}", str(script), part]
        numbers = [str(number) for number in (rows, DIM, size, steps)]
        printed = subprocess.run(
            [*command, *numbers],
            cwd=ROOT,
            env=inherited_environment(),
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        ).stdout
        statistics = json.loads(next(folder.glob("job/**/statistics.json")).read_text("utf-8"))
    workers = []
    for rank, (distinct, peak, seconds) in enumerate(json.loads(printed.splitlines()[-1])):
        (table,) = statistics["workers"][str(rank)]["tensors"]
        traffic = {key: table[key] for key in ("bytes_out", "bytes_in")}
        workers.append(Worker(distinct=distinct, peak=peak, seconds=seconds, **traffic))
    return workers, [shard["peak_bytes"] for shard in statistics["shards"].values()]


def main(arguments: list[str] | None = None) -> int:
    """Run both jobs, and print their tables. Return 0 if the bytes are within 1.1 of the formula."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the table of `memory`")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file too")
    flags = parser.parse_args(arguments)
    lines = ["| worker | distinct rows a step | out | in | U (4 + 4 d) | ratio |", "|---" * 6 + "|"]
    ratios = []
    workers, _ = run("bytes", ROWS, LOOKUPS, STEPS)
    for rank, worker in enumerate(workers):
        limit = worker.distinct * (4 + 4 * DIM)
        ratios.append(max(worker.bytes_out, worker.bytes_in) / limit)
        lines.append(
            f"| {rank} | {worker.distinct / STEPS:,.0f} | {worker.bytes_out / STEPS:,.0f} | "
            f"{worker.bytes_in / STEPS:,.0f} | {limit / STEPS:,.0f} | {ratios[-1]:.3f} |"
        )
    rows = int(flags.gigabytes * 1e9 / (4 * DIM))
    workers, shard_peaks = run("memory", rows, PIECE, -(-rows // (2 * PIECE)))
    lines += ["", "| rows | table | a worker | a shard | seconds |", "|---|---|---|---|---|"]
    lines.append(
        f"| {rows:,} | {4 * DIM * rows / 1e9:.2f} GB | {max(w.peak for w in workers) / 1e9:.2f}"
        f" GB | {max(shard_peaks) / 1e9:.2f} GB | {workers[0].seconds:.0f} |"
    )
    print("\n".join(lines))
    if flags.markdown:
        flags.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if max(ratios) <= 1.1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
