"""Runs of seeds: judged, and shrunk where a law does not hold."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

import torch

from tests.simulation.scenarios import (
    devices,
    elastic,
    factors,
    job,
    quorum,
    rendezvous,
    sealed,
    server,
    sums,
)
from tests.simulation.world import World

MOST_RUNS = 400
"""Runs of one seed to shrink it."""
COLLECT_AFTER = 10_000
"""Objects."""
Scenario = Callable[[World], None]
SCENARIOS: Mapping[str, Scenario] = {
    "server": server.simulate,
    "factors": factors.simulate,
    "sums": sums.simulate,
    "sealed": sealed.simulate,
    "job": job.simulate,
    "elastic": elastic.simulate,
    "quorum": quorum.simulate,
    "rendezvous": rendezvous.simulate,
    "devices": devices.simulate,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A seed in which a law does not hold.

    Attributes:
        scenario: its name.
        seed: the seed.
        error: what was raised.
        deviations: the fewest that were found to lead to it.
    """

    scenario: str
    seed: int
    error: Exception
    deviations: tuple[str, ...]

    def describe(self) -> str:
        """Return what has happened, from what, and the command that shows it again."""
        lines = [f"{self.scenario}, seed {self.seed}: {type(self.error).__name__}: {self.error}"]
        lines += [f"    {deviation}" for deviation in self.deviations or ["(undisturbed)"]]
        command = f"python -m tests.simulation --scenario={self.scenario} --first={self.seed}"
        return "\n".join([*lines, f"    shown by: {command} --seeds=1"])


def run(
    scenario: str, seed: int, only: frozenset[str] | None = None
) -> tuple[World, Exception | None]:
    """Run a seed; return its world, and what it raised."""
    world = World(seed, only=only)
    try:
        with torch.inference_mode():
            SCENARIOS[scenario](world)
    except Exception as error:  # noqa: BLE001 - reported with the seed
        return world, error
    return world, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A seed that was run.

    Attributes:
        seed: the seed.
        world: in which it ran; other seeds may have run there before.
        events: of this seed.
        seconds: of simulated time.
        error: what it has raised.
    """

    seed: int
    world: World
    events: int
    seconds: float
    error: Exception | None


def run_seeds(scenario: str, seeds: range) -> Iterator[Ran]:
    """Run seeds one after another. Those of one job of `devices` share what is built; once one has
    failed, those that come after it in the job are left out.
    """
    if scenario == "devices":
        for number in range(seeds.start // devices.SEEDS, -(-seeds.stop // devices.SEEDS)):
            yield from _run_job(number, seeds)
        return
    for seed in seeds:
        world, error = run(scenario, seed)
        yield Ran(seed=seed, world=world, events=world.events, seconds=world.now, error=error)


def _run_job(number: int, seeds: range) -> Iterator[Ran]:
    """Run those of the seeds that are of a job of `devices`."""
    world, events, now = World(number), 0, 0.0
    first = number * devices.SEEDS
    with torch.inference_mode(), closing(devices.seeds_of_job(world, number)) as job:
        for seed in range(first, min(first + devices.SEEDS, seeds.stop)):
            error: Exception | None = None
            try:
                next(job)
            except Exception as found:  # noqa: BLE001 - reported with the seed
                error = found
            if seed in seeds or error is not None:
                yield Ran(
                    seed=seed,
                    world=world,
                    events=world.events - events,
                    seconds=world.now - now,
                    error=error,
                )
            if error is not None:
                return
            events, now = world.events, world.now


def shrink(scenario: str, seed: int, error: Exception, happened: list[str]) -> Failure:
    """Find few deviations that lead to an error of the same kind (delta debugging: Zeller, 1999).

    Args:
        scenario: its name.
        seed: the seed.
        error: what it has raised.
        happened: the deviations of that run.
    """
    runs, parts = 0, 2
    kept = list(dict.fromkeys(happened))

    def fails(keys: list[str]) -> bool:
        nonlocal runs, error
        runs += 1
        _, found = run(scenario, seed, frozenset(keys))
        if type(found) is not type(error):
            return False
        error = found if found is not None else error
        return True

    if fails([]):
        return Failure(scenario=scenario, seed=seed, error=error, deviations=())
    while kept and runs < MOST_RUNS:
        size = -(-len(kept) // parts)
        for at in range(0, len(kept), size):
            fewer = kept[:at] + kept[at + size :]
            if fewer and fails(fewer):
                kept, parts = fewer, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(kept), 2 * parts)
    return Failure(scenario=scenario, seed=seed, error=error, deviations=tuple(kept))


def prepare() -> None:
    """Prepare this process for many runs: one core, for its threads hand a baton around, and few
    collections, with nothing of before.
    """
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
