"""The start of a job: the moments that jobs print, and the table of their phases."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.startup import Measured, durations, moments_in, table


@pytest.mark.parametrize(
    ("lines", "trains", "moments"),
    [
        (["starting 2 workers...", "moments [3.0, 4.5, 5.0]"], False, (3.0, 4.5, 5.0)),
        (["starting 2 workers...", "I1127 solver.cpp:294] Iteration 0, loss: 2.3"], True, (0, 1)),
    ],
)
def test_moments_are_read_from_what_a_job_prints(
    lines: list[str], trains: bool, moments: Sequence[float]
) -> None:
    assert moments_in(((came_s, line) for came_s, line in enumerate(lines)), trains=trains) == (
        moments
    )


def test_a_job_that_makes_no_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="without a first step"):
        moments_in(iter([(0.0, "starting 2 workers...")]), trains=True)


def test_a_phase_ends_where_the_next_begins() -> None:
    assert durations(1.0, [2.0, 2.5, 4.0]) == (1.0, 0.5, 1.5)


def test_rows_are_medians_and_ratios_to_the_first() -> None:
    torchs = Measured(phases=[(1.0,) * 5, (2.0,) * 5, (9.0,) * 5], cpu_s=[8.0, 8.0, 80.0])
    ours = Measured(phases=[(0.5,) * 5], cpu_s=[6.0])
    train = Measured(phases=[(3.0, 4.0)], cpu_s=[4.0])
    _, first, second, third = table({"torchrun": torchs, "ours": ours, "train": train})
    assert first.split() == [
        "torchrun",
        *["2.00"] * 5,
        "10.00",
        "5.00-45.00",
        "1.00",
        "8.00",
        "1.00",
    ]
    assert second.split()[6:] == ["2.50", "2.50-2.50", "0.25", "6.00", "0.75"]
    assert third.split() == ["train", "3.00", "4.00", "7.00", "7.00-7.00", "0.70", "4.00", "0.50"]
