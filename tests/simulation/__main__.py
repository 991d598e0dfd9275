"""Simulates jobs, each from a seed, and checks the laws of the protocols at each step.

python -m tests.simulation --seeds 1000
python -m tests.simulation --scenario server --first 127 --seeds 1    # one of them again
"""

from __future__ import annotations

import argparse
import math
import time

from tests.simulation.runs import SCENARIOS, prepare, run_seeds, shrink

MOST_FAILURES = 5


def main(arguments: list[str] | None = None) -> int:
    """Run seeds of every scenario, or of one; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=1000, help="of all scenarios together")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="of this process's core, at most"
    )
    parser.add_argument("--scenario", choices=SCENARIOS, help="this one alone")
    flags = parser.parse_args(arguments)
    names = [flags.scenario] if flags.scenario else list(SCENARIOS)
    failures = 0
    prepare()
    for number, name in enumerate(names):
        share = len(range(number, flags.seeds, len(names)))
        seeds = range(flags.first, flags.first + share)
        failures += show_seeds(name, seeds, 60 * flags.minutes / len(names))
    return min(failures, 1)


def show_seeds(name: str, seeds: range, most_s: float) -> int:
    """Run seeds of a scenario and print what they show; return how many have failed."""
    began_s, done, events, simulated_s, lossy, failures = time.process_time(), 0, 0, 0.0, 0, 0
    try:
        for ran in run_seeds(name, seeds):
            done, events, simulated_s = done + 1, events + ran.events, simulated_s + ran.seconds
            lossy += ran.world.lossy
            if ran.error is not None:
                failures += 1
                happened = ran.world.deviations
                print(shrink(name, ran.seed, ran.error, happened).describe(), flush=True)
            if time.process_time() - began_s > most_s or failures == MOST_FAILURES:
                break
    finally:  # also after Ctrl-C
        took_s = max(time.process_time() - began_s, 1e-9)
        print(
            f"{name}: {done} seeds from {seeds.start} on, {lossy} with a loss, {failures} failed; "
            f"{1000 * took_s / max(done, 1):.1f} ms of a core and {events // max(done, 1)} events "
            f"a seed, {simulated_s / took_s:.0f} simulated seconds a second",
            flush=True,
        )
    return failures


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
