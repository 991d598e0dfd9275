#!/usr/bin/env python3
"""Measure the figures of README again, and tell which claims hold.

    sudo python benchmarks/claims.py                          # all of them: make claims
    sudo python benchmarks/claims.py --only alexnet,resnet50  # some measurements
    python benchmarks/claims.py --publish                     # the last figures into the pages

Each measurement is a command of benchmarks/cluster.py or scale.py. Results go to benchmarks/results/claims.json
and docs/claims.md. The status is 1 if a claim fails or could not be measured in time.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

from benchmarks.claim_checks.claims import CLAIMS, MEASUREMENTS, SENTENCES
from benchmarks.claim_checks.definitions import ClaimError, Facts, Measurement, Speedup
from benchmarks.claim_checks.page import (
    PAGE,
    RESULTS,
    failed,
    page,
    publish,
    read_results,
    terminal,
    write_results,
)

MINUTES = 15.0
QUIET = 0.5
"""The load average of a machine on which nothing else runs."""
END_S = 30.0


def names(text: str) -> tuple[str, ...]:
    """`alexnet,resnet50`."""
    known = [each.name for each in MEASUREMENTS]
    words = tuple(text.split(","))
    for word in words:
        if word not in known:
            raise argparse.ArgumentTypeError(f"'{word}' is none of {', '.join(known)}")
    return words


def run(measurement: Measurement, limit_s: float) -> Facts:
    """Run a command. Return its facts.

    Raises:
        ClaimError: it failed, or took longer.
    """
    with tempfile.TemporaryDirectory(prefix="claims") as folder:
        result = Path(folder) / "facts.json"
        words = [sys.executable, str(ROOT / "benchmarks" / measurement.script)]
        words += [*shlex.split(measurement.words), "--json", str(result)]
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            status = process.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired as error:
            raise ClaimError(f"{measurement.name}: the {limit_s:.0f} s are over") from error
        finally:
            if process.poll() is None:
                process.terminate()  # it removes its hosts
                process.wait(END_S)
        if status:
            raise ClaimError(f"{measurement.name} ended with status {status}")
        tables = json.loads(result.read_text(encoding="utf-8"))
        return [fact for table in tables for fact in table["facts"]]


def measure(
    measurement: Measurement, limit_s: float
) -> dict[str, tuple[float | None, float | None]]:
    """Return the seconds of both jobs of a command's claims, by name; None for those that it did
    not measure.
    """
    by_name = {claim.name: claim.by for claim in CLAIMS if isinstance(claim.by, Speedup)}
    found: dict[str, tuple[float | None, float | None]] = dict.fromkeys(
        names_of(measurement), (None, None)
    )
    _say(measurement.command)
    try:
        facts = run(measurement, limit_s)
        for name in found:
            ours_s, other_s = by_name[name].seconds(facts)
            found[name] = round(ours_s, 4), round(other_s, 4)
    except ClaimError as error:
        _say(str(error))
    return found


def names_of(measurement: Measurement) -> list[str]:
    """Return the names of the claims that a command measures."""
    return [
        claim.name
        for claim in CLAIMS
        if isinstance(claim.by, Speedup) and claim.by.measurement == measurement.name
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; returns the exit code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=names, help="measurements, by name (all)")
    parser.add_argument("--publish", action="store_true", help="write the last figures into pages")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"at most ({MINUTES:g})")
    flags = parser.parse_args(arguments)
    results = read_results(RESULTS)
    chosen = [each for each in MEASUREMENTS if not flags.only or each.name in flags.only]
    if flags.publish:
        try:
            results = publish(SENTENCES, results, [n for each in chosen for n in names_of(each)])
        except ClaimError as error:
            _say(str(error))
            return 1
    end_s = time.monotonic() + 60 * flags.minutes
    for each in () if flags.publish else chosen:
        load = round(os.getloadavg()[0], 1)
        if load > QUIET:
            _say(f"the load of this machine is {load}: figures may be off")
        for name, (ours_s, other_s) in measure(each, end_s - time.monotonic()).items():
            results[name] = replace(results[name], ours_s=ours_s, other_s=other_s, load=load)
        write_results(results, RESULTS)
    write_results(results, RESULTS)
    PAGE.write_text(page(CLAIMS, MEASUREMENTS, results), encoding="utf-8")
    print("\n".join(terminal(CLAIMS, MEASUREMENTS, results)))
    if failures := failed(CLAIMS, results):
        _say(f"these claims do not hold: {', '.join(failures)}")
    return 1 if failures else 0


def _say(sentence: str) -> None:
    print(f"claims.py: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
