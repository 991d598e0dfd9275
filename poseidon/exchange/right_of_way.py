"""Factors leave a host before its pushes do: whether they are still leaving. Pure: is told what waits, and the time.

Both want the one link at the same time, and what follows is not alike: a push costs a shard an addition, factors cost
every worker a product, the longest work that follows from any message. With factors first, products are made while
pushes and values travel.

Law: only what moves has the right of way. A peer that has taken nothing for `STALL_S` counts for nothing until it
takes something again, so a worker that hangs delays nobody's pushes for longer.
"""

from __future__ import annotations

STALL_S = 2.0


class RightOfWay:
    """What one worker's peers have still to take.

    Args:
        peers: how many there are.
    """

    def __init__(self, peers: int) -> None:
        self._waiting = [0] * peers
        self._moved_s = [0.0] * peers

    def note(self, peer: int, waiting: int, now_s: float) -> None:
        """So many messages for a peer have not left."""
        if waiting < self._waiting[peer] or not self._waiting[peer]:
            self._moved_s[peer] = now_s
        self._waiting[peer] = waiting

    def is_taken(self, now_s: float) -> bool:
        """Whether anything is on its way out."""
        waits = zip(self._waiting, self._moved_s, strict=True)
        return any(waiting and now_s - moved_s < STALL_S for waiting, moved_s in waits)
