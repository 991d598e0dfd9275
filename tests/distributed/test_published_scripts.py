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
ALWAYS = {"fabric", "lightning_fit", "penalties", "validation"}
"""The rest runs with `--thorough`."""
ROUNDING = 5e-5
"""Factors of several workers are one product, whose sums have another order; AdamW enlarges the
differences of small gradients. Scripts without factors agree to the bit.
"""


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
