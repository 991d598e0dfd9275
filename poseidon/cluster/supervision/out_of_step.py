"""Whether the workers of a script can still meet: all are to make as many steps before each meeting.

Law: a finding is certain, whatever moments the places are of. Who waits in a meeting makes no step before all have come to it,
so another that has not come, yet has made more steps, either waits for this one or will come too late.
"""

from __future__ import annotations

from collections.abc import Mapping

from poseidon.cluster.events import Place


def out_of_step(places: Mapping[int, Place]) -> str | None:
    """One sentence about two workers that can never meet; None: there are none.

    Args:
        places: by rank, what each worker has last told.
    """
    for rank, place in places.items():
        for other, beyond in places.items():
            if place.meeting and beyond.meetings < place.meetings and beyond.steps > place.steps:
                return (
                    f"worker {rank} waits in {place.meeting}() after step {place.steps}, and worker {other} has gone on to step "
                    f"{beyond.steps} without it: every worker must make as many steps before each mean() and settle()"
                )
    return None
