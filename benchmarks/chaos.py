"""Inject faults into jobs at random moments, and compare how they end with an undisturbed run.

python benchmarks/chaos.py --runs=30
python benchmarks/chaos.py --runs=30 --hosts --clients=3
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from poseidon.cli.entry import use_environment

use_environment()

from benchmarks.chaos_runs.faults import draw
from benchmarks.chaos_runs.harness import Harness
from benchmarks.chaos_runs.local import LocalHarness
from benchmarks.chaos_runs.outcome import read_lines, table, to_line
from benchmarks.chaos_runs.remote import RemoteHarness
from tests.support.ssh_hosts import SshHosts


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return 0 if every run ended as expected."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=30, help="how many (30)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (0)")
    parser.add_argument("--clients", type=int, default=2, help="clients of each job (2)")
    parser.add_argument(
        "--hosts",
        action="store_true",
        help="on hosts with a network and a file tree each; needs root",
    )
    parser.add_argument("--iterations", type=int, default=700, help="iterations of each job (700)")
    parser.add_argument(
        "--folder", type=Path, help="folder of data, logs and results; later calls add to it"
    )
    flags = parser.parse_args(arguments)
    if flags.folder:
        return run(flags, flags.folder)
    with tempfile.TemporaryDirectory(prefix="poseidon-chaos-") as folder:
        return run(flags, Path(folder))


def run(flags: argparse.Namespace, folder: Path) -> int:
    """Make the runs, add them to those in the folder, and print the table of all."""
    folder = folder.absolute()
    if not flags.hosts:
        return disturb(flags, folder, LocalHarness(folder, flags.clients, flags.iterations))
    with (
        tempfile.TemporaryDirectory(prefix="poseidon-hosts-") as place,
        SshHosts(Path(place), flags.clients + 1) as hosts,
    ):
        return disturb(flags, folder, RemoteHarness(folder, hosts, flags.iterations))


def disturb(flags: argparse.Namespace, folder: Path, harness: Harness) -> int:
    """Inject faults into the jobs of a harness.

    Return 0 if every run in the folder ended as expected.
    """
    folder.mkdir(parents=True, exist_ok=True)
    print(f"undisturbed: {harness.undisturbed():.1f} s", file=sys.stderr, flush=True)
    results = folder / "runs.jsonl"
    for seed in range(flags.first, flags.first + flags.runs):
        ended = harness.run(seed, draw(seed, harness.kinds, harness.clients))
        with results.open("a", encoding="utf-8") as file:
            file.write(to_line(ended))
        print(
            f"{'good' if ended.good else 'BAD '} {table([ended])[-1]}", file=sys.stderr, flush=True
        )
    runs = read_lines(results.read_text(encoding="utf-8"))
    good = sum(each.good for each in runs)
    print("\n".join([*table(runs), "", f"{good} of {len(runs)} as they must"]))
    return 0 if good == len(runs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
