"""Seeds of every scenario, that a seed repeats a run, and that a failing one is shrunk."""

from __future__ import annotations

from random import Random

import pytest

from tests.simulation import runs
from tests.simulation.__main__ import main
from tests.simulation.scenarios import devices
from tests.simulation.world import Violation, World

SEEDS = {
    "server": 40,
    "factors": 60,
    "sums": 60,
    "sealed": 40,
    "job": 40,
    "elastic": 6,
    "quorum": 20,
    "rendezvous": 20,
}
"""How many of each scenario; `--thorough` runs four times as many."""
PART = 20
"""The most seeds of one test."""
OF_DEVICES = 640
"""The same of `devices`, of which many share a job."""


@pytest.mark.parametrize(
    ("scenario", "seeds"),
    [
        # A link is down for 6.3 s, and its worker leaves meanwhile.
        pytest.param("server", range(7_151_170, 7_151_171), id="server-7151170"),
        *(
            pytest.param(
                scenario,
                range(first, first + min(PART, count)),
                marks=() if first < count else pytest.mark.thorough,
                id=f"{scenario}-{first}",
            )
            for scenario, count in SEEDS.items()
            for first in range(0, 4 * count, min(PART, count))
        ),
    ],
)
def test_no_law_is_broken(scenario: str, seeds: range) -> None:
    seen = set()
    for seed in (seeds[0], *seeds):  # the first one twice: a seed repeats a run
        world, error = runs.run(scenario, seed)
        assert error is None, runs.shrink(scenario, seed, error, world.deviations).describe()
        if seed == seeds[0]:
            seen.add((world.now, world.events, tuple(world.deviations)))
    assert len(seen) == 1


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=() if first < OF_DEVICES else pytest.mark.thorough)
        for first in range(0, 4 * OF_DEVICES, devices.SEEDS)
    ],
)
def test_no_device_meets_a_race(first: int) -> None:
    for ran in runs.run_seeds("devices", range(first, first + devices.SEEDS)):
        if ran.error is not None:
            failure = runs.shrink("devices", ran.seed, ran.error, ran.world.deviations)
            pytest.fail(failure.describe())


@pytest.mark.parametrize("last", [3, devices.SEEDS + 2])
def test_a_seed_that_shares_a_job_is_found_again_alone(last: int) -> None:
    *_, ran = runs.run_seeds("devices", range(last + 1))
    world, _ = runs.run("devices", last)
    assert (world.now, world.events) == (ran.world.now, ran.world.events)
    assert world.deviations == ran.world.deviations


def test_a_failing_seed_is_shrunk_and_printed_with_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(world: World) -> None:
        happened = {number for number in range(50) if world.deviates(f"late {number}")}
        if {7, 30} <= happened:
            raise Violation("two frames were late")

    monkeypatch.setattr(runs, "SCENARIOS", {"server": breaks})
    assert main(["--scenario=server", "--first=4", "--seeds=1"]) == 1
    assert capsys.readouterr().out.splitlines()[:4] == [
        "server, seed 4: Violation: two frames were late",
        "    late 7",
        "    late 30",
        "    shown by: python -m tests.simulation --scenario=server --first=4 --seeds=1",
    ]


def test_a_deviation_that_is_switched_off_leaves_the_others_as_they_are() -> None:
    drawn = [Random(f"{1} link a b").random()]
    assert World(1).stream("link a b").random() == drawn[0]
    world = World(1, only=frozenset({"b"}))
    assert [world.deviates(key) for key in "abc"] == [False, True, False]
    assert world.deviations == ["b"]
