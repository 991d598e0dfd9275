"""Once warm, an iteration takes no fresh memory from the system, neither on the worker nor on
the shard.
"""

from __future__ import annotations

import statistics

import pytest

from tests.support.memory_child import output_of

ELEMENTS = 4 * 2**20
PAGE_BYTES = 4096
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
}


def fresh_pages(kind: str, elements: int) -> list[int]:
    pages: list[int] = output_of(
        "tests.support.steady_child", kind, str(elements), malloc=KEEP_FREED_MEMORY
    )
    return pages


@pytest.mark.processes
@pytest.mark.parametrize("kind", [pytest.param("SGD", marks=pytest.mark.thorough), "Adam"])
def test_the_steady_state_takes_no_fresh_memory(kind: str) -> None:
    """A copy of the model made anew in each iteration would touch all its pages each time: 20
    times the bound.

    Of most iterations: where threads are late, more messages wait than ever before, once, and then
    there is memory for them.
    """
    pages = fresh_pages(kind, ELEMENTS)
    one_copy = ELEMENTS * 4 // PAGE_BYTES
    assert statistics.median(pages) < one_copy / 20, pages
