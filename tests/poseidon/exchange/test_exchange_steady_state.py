"""Once warm, an exchange between whole nets takes no memory of a weight's size; only autograd
makes new gradients.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.memory_child import output_of
from tests.support.steady_exchange_child import LARGE_LAYERS, WIDTH, WORKERS

MAP_WHAT_IS_LARGE = {
    "MALLOC_MMAP_THRESHOLD_": str(3 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(3 * 2**20),
    "NUMPY_MADVISE_HUGEPAGE": "0",
}
WEIGHT_PAGES = 4 * WIDTH * WIDTH // 4096


def train(kind: str, passes: int) -> dict[str, Any]:
    found: dict[str, Any] = output_of(
        "tests.support.steady_exchange_child", kind, str(passes), malloc=MAP_WHAT_IS_LARGE
    )
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "passes", "gradients"),
    [
        ("svb", 1, 0),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (("ps", 1, 1), ("svb", 2, 0))
        ),
    ],
)
def test_an_iteration_takes_no_memory_of_a_weights_size(
    kind: str, passes: int, gradients: int
) -> None:
    """Save autograd's: a gradient for each large weight and pass on the server's way, none as
    factors.

    What is small may be given back and taken again, now more, now less; what is large is taken in
    each iteration. Nothing is kept: of each half of the iterations the least that is in use counts,
    since a thread may be late to give back a message.
    """
    found = train(kind, passes)
    weights = WORKERS * LARGE_LAYERS * WEIGHT_PAGES
    assert min(found["pages"]) < (gradients + 0.75) * weights, found
    half = len(found["in_use"]) // 2
    assert min(found["in_use"][half:]) - min(found["in_use"][:half]) < WEIGHT_PAGES * 4096 // 4, (
        found
    )
