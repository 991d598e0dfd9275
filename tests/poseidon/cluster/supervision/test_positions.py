"""The positions of a script's workers in their loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from poseidon.base.call_names import LoopPosition
from poseidon.cluster.supervision.positions import LoopPositions

WAITS = LoopPosition(loop=None, iterations=6, collections=3, collection="mean")


def moved(*positions: LoopPosition) -> str | None:
    """Return what is said once workers 0, 1, ... have reported these positions, in this order."""
    known = LoopPositions()
    sentences = [known.move(rank, position) for rank, position in enumerate(positions)]
    assert not any(sentences[:-1])
    return sentences[-1]


@pytest.mark.parametrize(
    ("other", "never"),
    [
        (LoopPosition(loop=None, iterations=7, collections=2, collection=""), True),
        (LoopPosition(loop=None, iterations=9, collections=2, collection="settle"), True),
        (
            LoopPosition(loop=None, iterations=6, collections=2, collection="step"),
            True,
        ),  # its step needs the other's
        (LoopPosition(loop=None, iterations=5, collections=2, collection="step"), False),
        (LoopPosition(loop=None, iterations=6, collections=3, collection="step"), False),
        (
            LoopPosition(loop=None, iterations=6, collections=2, collection=""),
            False,
        ),  # not yet there
        (LoopPosition(loop=None, iterations=2, collections=2, collection=""), False),
        (
            LoopPosition(loop=None, iterations=6, collections=3, collection="mean"),
            False,
        ),  # has begun it
        # has passed it: the report of WAITS is old
        (LoopPosition(loop=None, iterations=7, collections=3, collection=""), False),
        (LoopPosition(loop=None, iterations=7, collections=4, collection="mean"), False),
    ],
)
def test_a_worker_waits_for_one_that_has_gone_on(other: LoopPosition, never: bool) -> None:
    found = [moved(WAITS, other), moved(other, WAITS)]
    assert [sentence is not None for sentence in found] == [never, never]


MEAN_OF_SECOND = LoopPosition(iterations=6, collections=3, collection="mean", loop=1)


@pytest.mark.parametrize(
    ("one", "other", "never"),
    [
        ({}, {"loop": 0}, True),
        ({}, {"loop": 2, "collection": "save"}, True),
        ({"collection": "step"}, {"collection": "step", "loop": 0}, True),
        ({"collection": "means"}, {"collection": "means", "loop": 0}, True),
        ({"collection": "means", "iterations": 7}, {"collection": "step", "loop": 0}, True),
        ({"collection": "means"}, {"collection": "step", "loop": 0}, False),
        ({}, {}, False),
        ({}, {"loop": None}, False),  # its iterations are not those of the others
        # the report of one is old
        ({}, {"loop": 0, "iterations": 5}, False),
        ({}, {"loop": 0, "collections": 2}, False),
        ({}, {"loop": 0, "collection": ""}, False),
        ({}, {"loop": 0, "collection": "step"}, False),
        ({"collection": "distribute"}, {"loop": 0, "collection": "step"}, False),
        ({}, {"loop": -1, "collection": "torch.distributed.reduce"}, True),
        # it waits for an earlier call of its own
        ({}, {"loop": None, "collection": "torch.distributed.reduce"}, False),
        ({}, {"loop": 0, "collection": "close", "raised": "ValueError: odd batch"}, False),
    ],
)
def test_two_workers_that_wait_in_calls_of_different_modules(
    one: dict[str, Any], other: dict[str, Any], never: bool
) -> None:
    positions = replace(MEAN_OF_SECOND, **one), replace(MEAN_OF_SECOND, **other)
    found = [moved(*positions), moved(*reversed(positions))]
    assert [sentence is not None for sentence in found] == [never, never]


OF_FIRST = LoopPosition(iterations=3, collections=2, collection="values", loop=0, loops=(2, 1))
OF_SECOND = replace(OF_FIRST, loop=1, loops=(1, 2))


@pytest.mark.parametrize(
    ("one", "other", "never"),
    [
        ({}, {}, True),
        ({"collection": "means"}, {}, True),
        ({}, {"collection": ""}, False),
        ({}, {"collection": "step"}, False),  # which may not wait
        ({}, {"loop": None}, False),
        ({}, {"loops": (2, 1)}, False),  # its values are on their way
        ({}, {"loops": (2, 2), "iterations": 4}, False),  # the report of the first is old
        ({}, {"collection": "distribute", "loops": (1, 1, 0), "loop": 2}, True),
        ({}, {"collection": "distribute", "loops": (2, 1, 0), "loop": 2}, False),
        (
            {"collection": "mean", "collections": 3},
            {"collection": "distribute", "loops": (2, 1, 0), "loop": 2},
            True,
        ),
    ],
)
def test_two_workers_that_wait_for_each_other(
    one: dict[str, Any], other: dict[str, Any], never: bool
) -> None:
    positions = replace(OF_FIRST, **one), replace(OF_SECOND, **other)
    found = [moved(*positions), moved(*reversed(positions))]
    assert [sentence is not None for sentence in found] == [never, never]


def test_the_sentence_names_the_calls_and_modules_of_two_workers() -> None:
    must = ": all workers must make the same calls in the same order"
    first = replace(MEAN_OF_SECOND, loop=0)
    assert moved(MEAN_OF_SECOND, first) == (
        f"worker 0 waits in mean() of module 2, and worker 1 waits in mean() of module 1{must}"
    )
    steps = [replace(position, collection="step") for position in (MEAN_OF_SECOND, first)]
    assert moved(*steps) == (
        f"worker 0 ends a step of module 2, and worker 1 ends a step of module 1{must}"
    )
    assert moved(OF_FIRST, OF_SECOND) == (
        "worker 0 waits for the values of module 1 after its step 2, and worker 1 waits for the "
        f"values of module 2 after its step 2{must}"
    )
    calls = {"loop": -1, "collection": "torch.distributed.all_reduce"}
    assert moved(MEAN_OF_SECOND, replace(MEAN_OF_SECOND, **calls)) == (
        "worker 0 waits in mean() of module 2, and worker 1 waits in "
        f"torch.distributed.all_reduce(){must}"
    )


def test_the_sentence_names_both_workers_and_steps() -> None:
    assert moved(
        WAITS, WAITS, LoopPosition(loop=None, iterations=7, collections=2, collection="")
    ) == (
        "worker 0 waits in mean() after step 6, but worker 2 has continued to step 7: "
        "all workers must call mean() "
        "after the same number of steps"
    )


def test_of_many_that_wait_the_one_behind_is_named() -> None:
    behind = LoopPosition(
        loop=None, iterations=5, collections=WAITS.collections, collection=WAITS.collection
    )
    other = LoopPosition(loop=None, iterations=6, collections=WAITS.collections - 1, collection="")
    sentence = moved(WAITS, WAITS, behind, other)
    assert sentence is not None
    assert sentence.startswith("worker 2 waits in mean() after step 5, but worker 3 has")


def test_a_single_position_does_not_mismatch() -> None:
    assert moved(WAITS) is None


def test_only_the_last_position_of_a_worker_counts() -> None:
    known = LoopPositions()
    assert (
        known.move(0, LoopPosition(loop=None, iterations=7, collections=2, collection="")) is None
    )
    assert (
        known.move(0, LoopPosition(loop=None, iterations=7, collections=3, collection="")) is None
    )
    assert known.move(1, WAITS) is None


def test_one_that_ends_without_joining() -> None:
    known = LoopPositions()
    joining = LoopPosition(loop=None, iterations=0, collections=0, collection="distribute")
    assert (
        known.move(0, LoopPosition(loop=None, iterations=0, collections=0, collection="")) is None
    )
    assert known.end_without_joining(3) is None
    sentence = "worker 2 waits in distribute(), but worker 3 has ended without calling it: "
    found = known.move(2, joining)
    assert found == sentence + "every worker must call poseidon.distribute()"
    known = LoopPositions()
    assert known.move(2, joining) is None
    assert known.end_without_joining(3) == found


def test_many_workers_at_few_positions_are_few_comparisons() -> None:
    known = LoopPositions()
    for collections in range(1, 4):
        for rank in range(2000):
            assert (
                known.move(
                    rank,
                    LoopPosition(
                        loop=None, iterations=6, collections=collections, collection="mean"
                    ),
                )
                is None
            )
