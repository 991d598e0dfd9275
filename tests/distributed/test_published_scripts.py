"""Scripts of the kind that people publish: a job prints the losses that they print under torchrun,
or under plain python where they start their workers themselves.
"""

from __future__ import annotations

import pytest

from benchmarks.beside_torchrun import SCRIPTS, compare

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
NEEDS = {
    "lightning_fit": "lightning",
    "fabric": "lightning",
    "accelerate_loop": "huggingface",
    "finetuning": "huggingface",
}
ALWAYS = {"fabric"}
"""The rest runs with `--thorough`."""
ROUNDING = 2e-6
"""Means of float32 are added in an order that gloo does not promise."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                *([pytest.mark.needs(NEEDS[name])] if name in NEEDS else []),
                *([] if name in ALWAYS else [pytest.mark.thorough]),
            ],
        )
        for name in SCRIPTS
    ],
)
def test_a_job_prints_what_torchrun_prints(name: str) -> None:
    apart, _, _ = compare(name, workers=2, rounds=1)
    assert apart <= ROUNDING
