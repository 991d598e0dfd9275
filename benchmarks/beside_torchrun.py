#!/usr/bin/env python3
"""Run scripts of the kind that people publish under torchrun and in a job, and compare them.

    python benchmarks/beside_torchrun.py
    python benchmarks/beside_torchrun.py --only=gan,penalties --rounds=3 --workers=3
    python benchmarks/beside_torchrun.py --write    # the table of docs/from_ddp.md

The scripts in `benchmarks/published_scripts` were written for torchrun, or start their workers
themselves. Both run with one thread a worker on this machine; torchrun uses gloo. `lightning_fit`
and `fabric` name the strategy "ddp" there and "poseidon" here; the others do not differ by a line.
A row has the largest difference of the losses that rank 0 prints, and the medians of the seconds a
step, by turns.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

from poseidon.base.settings import inherited_environment

PAGE = ROOT / "docs" / "from_ddp.md"
BEGIN, END = "<!-- table of scripts -->", "<!-- end of the table of scripts -->"
FOLDER = ROOT / "benchmarks" / "published_scripts"
SCRIPTS = tuple(sorted(path.stem for path in FOLDER.glob("*.py")))
STARTS_ITSELF = {"spawned_workers", "spawned_demo", "started_processes"}
"""Scripts that start their two workers: plain python runs them."""
NAMES_STRATEGY = {"lightning_fit", "fabric"}
TIMEOUT_S = 300
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


@dataclass
class Run:
    """What rank 0 of a run printed."""

    losses: list[list[float]] = field(default_factory=list)
    """The numbers of each line with a loss."""
    seconds: float = 0.0
    """Median of a step."""


def commands(name: str, workers: int, folder: Path) -> tuple[list[str], list[str]]:
    """Return the command for plain torch and the command for a job."""
    script = str(FOLDER / f"{name}.py")
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{rank} 127.0.0.1 0\n" for rank in range(workers)), encoding="utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workers}"]
    theirs = [sys.executable, *([] if name in STARTS_ITSELF else torchrun), script]
    ours = [sys.executable, "-m", "poseidon", "run", f"--hostfile={hosts}"]
    ours += [f"--output={folder / 'job'}", *([] if name in NAMES_STRATEGY else ["--ddp"]), script]
    if name in NAMES_STRATEGY:
        return [*theirs, "ddp"], [*ours, "poseidon"]
    return theirs, ours


def run(command: Sequence[str], folder: Path) -> Run:
    """Run a command in a folder.

    Raises:
        SystemExit: it failed, or has not ended in time.
    """
    environment = {
        **inherited_environment(),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "ACCELERATE_USE_CPU": "true",  # without it accelerate's processes train alone under torchrun
    }
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{' '.join(command)} has not ended within {TIMEOUT_S} s") from None
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}"
        )
    return printed(done.stdout)


def printed(text: str) -> Run:
    """Return what a script has printed."""
    found = Run()
    for line in text.splitlines():
        if "loss " in line:
            found.losses.append([float(number) for number in NUMBER.findall(line)])
        elif (at := line.find("seconds ")) >= 0:
            found.seconds = float(line[at:].split()[1])
    return found


def difference(ours: Run, theirs: Run) -> float:
    """Return the largest difference of two runs' numbers, relative to 1 or to the number.

    Raises:
        SystemExit: they have printed different lines.
    """
    if [len(line) for line in ours.losses] != [len(line) for line in theirs.losses]:
        raise SystemExit(f"different lines:\n{ours.losses}\n{theirs.losses}")
    pairs = (
        pair
        for lines in zip(ours.losses, theirs.losses, strict=True)
        for pair in zip(*lines, strict=True)
    )
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)


def compare(name: str, *, workers: int, rounds: int) -> tuple[float, float, float]:
    """Return the largest difference of a script's losses, and seconds a step there and here."""
    with tempfile.TemporaryDirectory() as folder:
        both: tuple[list[Run], list[Run]] = ([], [])
        for number in range(rounds):
            own = Path(folder, str(number))
            for of, runs in enumerate(both):
                place = own / str(of)
                place.mkdir(parents=True)
                runs.append(run(commands(name, workers, place)[of], place))
        theirs, ours = both
        apart = max(difference(b, a) for a, b in zip(theirs, ours, strict=True))
        there, here = (statistics.median(one.seconds for one in runs) for runs in both)
        return apart, there, here


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SCRIPTS), help=f"of {', '.join(SCRIPTS)}")
    parser.add_argument("--workers", type=int, default=2, help="where torchrun starts them (2)")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each script (1)")
    parser.add_argument("--write", action="store_true", help="write the table of docs/from_ddp.md")
    flags = parser.parse_args(arguments)
    print(f"{'script':<20} {'losses differ by':>16} {'torchrun':>9} {'poseidon':>9}  s a step")
    rows = []
    for name in flags.only.split(","):
        workers = 2 if name in STARTS_ITSELF else flags.workers
        try:
            apart, there, here = compare(name, workers=workers, rounds=flags.rounds)
        except SystemExit as failure:
            print(f"{name:<20} {failure}")
            continue
        print(f"{name:<20} {apart:>16.1e} {there:>9.4f} {here:>9.4f}", flush=True)
        rows.append((name, apart, there, here))
    if flags.write:
        write(rows)


def write(rows: Sequence[tuple[str, float, float, float]]) -> None:
    """Write rows of the table of docs/from_ddp.md, and keep its others.

    Args:
        rows: scripts, differences, and seconds there and here.
    """
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    by_name = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    by_name |= {
        name: f"| `{name}`: {about(name)} | {apart:.1g} | {there:.4f} | {here:.4f} |"
        for name, apart, there, here in rows
    }
    lines = [
        "| script | largest difference of its losses | torchrun, s a step | Poseidon, s a step |",
        "|---" * 4 + "|",
        *(by_name[name] for name in sorted(by_name)),
    ]
    PAGE.write_text(before + "\n".join((BEGIN, *lines, END)) + after, "utf-8")


def about(name: str) -> str:
    """Return the first sentence of a script's docstring."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ").rstrip(".")


if __name__ == "__main__":
    main()
