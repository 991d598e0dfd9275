"""Which workers of a script can never meet again."""

from __future__ import annotations

import pytest

from poseidon.cluster.events import Place
from poseidon.cluster.supervision.out_of_step import out_of_step

WAITS = Place(steps=6, meetings=3, meeting="mean")


@pytest.mark.parametrize(
    ("other", "never"),
    [
        (Place(steps=7, meetings=2, meeting=""), True),
        (Place(steps=9, meetings=2, meeting="settle"), True),
        (Place(steps=6, meetings=2, meeting=""), False),  # on its way
        (Place(steps=2, meetings=2, meeting=""), False),
        (Place(steps=6, meetings=3, meeting="mean"), False),  # has come
        (Place(steps=7, meetings=3, meeting=""), False),  # has been there: what WAITS has told is old
        (Place(steps=7, meetings=4, meeting="mean"), False),
    ],
)
def test_who_can_never_meet(other: Place, never: bool) -> None:
    found = [out_of_step({0: WAITS, 1: other}), out_of_step({0: other, 1: WAITS})]
    assert [sentence is not None for sentence in found] == [never, never]


def test_the_sentence_says_who_is_where() -> None:
    assert out_of_step({0: WAITS, 1: WAITS, 2: Place(steps=7, meetings=2, meeting="")}) == (
        "worker 0 waits in mean() after step 6, and worker 2 has gone on to step 7 without it: every worker must make as "
        "many steps before each mean() and settle()"
    )


def test_a_worker_that_has_told_nothing_is_in_step() -> None:
    assert out_of_step({0: WAITS}) is None
