"""Fuzzing of one target: python -m tests.fuzz --kind prototxt --cases 10000 --seed 0 [--first N]
[--keep FOLDER]

Prints each finding with its seed, number and the file that holds the input, and at the end the
counts. A case that ends its process (a crash inside a library, a hang) is a finding too: the rest
goes on in a new process.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing as mp
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.judging import SECONDS, Outcome, judge
from tests.fuzz.targets import Kind, kinds
from tests.support.needs import SHARED

NAMES = (
    *(
        "prototxt",
        "branches",
        "solver",
        "binary",
        "caffemodel",
        "solverstate",
        "hdf5",
        "datum",
        "mean",
    ),
    *("detection", "augmentation", "annotated", "annotation"),
)


def main() -> int:
    """Run the command. Return 1 if there was a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--kind", choices=NAMES, required=True)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--keep", type=Path, help="a folder for the inputs of findings")
    arguments = parser.parse_args()
    keep = arguments.keep or Path(tempfile.mkdtemp(prefix="fuzz_"))
    keep.mkdir(parents=True, exist_ok=True)
    counts = _run(arguments.kind, arguments.seed, arguments.first, arguments.cases, keep.absolute())
    total = ", ".join(f"{counts[outcome.name]} {outcome.name.lower()}" for outcome in Outcome)
    print(f"{arguments.kind}, seed {arguments.seed}: {arguments.cases} cases: {total}")
    return 1 if counts[Outcome.FOUND.name] else 0


def _run(name: str, seed: int, first: int, cases: int, keep: Path) -> Counter[str]:
    """Return the counts of outcomes; a case that ends its process continues in a new one."""
    counts: Counter[str] = Counter()
    number, end = first, first + cases
    while number < end:
        inbox, outbox = mp.Pipe(duplex=False)
        child = mp.get_context("fork").Process(
            target=_work, args=(name, seed, number, end, keep, outbox)
        )
        child.start()
        outbox.close()
        try:
            while True:
                number, outcome = inbox.recv()
                counts[outcome] += 1
                number += 1
        except EOFError:
            child.join()
        if number < end:
            print(
                f"case {number} of {name}, seed {seed}: its process ended with {child.exitcode}",
                flush=True,
            )
            counts[Outcome.FOUND.name] += 1
            number += 1
    return counts


def _work(name: str, seed: int, first: int, end: int, keep: Path, outbox: Any) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        kind = kinds(Path(folder), SHARED if (SHARED / "golden").is_dir() else None)[name]
        for number in range(first, end):
            faulthandler.dump_traceback_later(4 * SECONDS, exit=True)
            outbox.send((number, _one(kind, name, seed, number, Path(folder), keep).name))
            faulthandler.cancel_dump_traceback_later()
        os.chdir("/")


def _one(kind: Kind, name: str, seed: int, number: int, folder: Path, keep: Path) -> Outcome:
    path = folder / f"case{kind.suffix}"
    path.write_bytes(kind.case(seed, number))
    verdict = judge(kind.load, path)
    if verdict.outcome is Outcome.FOUND:
        kept = keep / f"{name}_{seed}_{number}{kind.suffix}"
        kept.write_bytes(path.read_bytes())
        print(f"case {number} of {name}, seed {seed} ({kept}):\n{verdict.words}\n", flush=True)
    return verdict.outcome


if __name__ == "__main__":
    raise SystemExit(main())
