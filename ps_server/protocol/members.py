"""The workers of one shard: the stage of each, and the messages that it may send.

    stranger --Hello--> known --Create--> joined --Leave--> left

Law: when a worker has left before the others have finished, no worker may wait for it: those that
continue are notified (`Gone`).
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import NamedTuple, get_args

from ps_server.errors import RemoteProtocolError
from ps_server.protocol import messages as m

MAX_ANSWERED_FAULTS = 100
"""For each worker. One fault ends a worker that keeps to the protocol."""


class Outgoing(NamedTuple):
    """A message for the peer with that transport name."""

    peer: bytes
    message: m.ToWorker


class Stage(Enum):
    """The stages of a peer."""

    STRANGER = "stranger"
    """Has sent no `Hello`."""
    KNOWN = "known"
    """Has a rank."""
    JOINED = "joined"
    """Has agreed on the store."""
    LEFT = "left"
    """Has finished."""


LEGAL: dict[Stage, dict[type, Stage]] = {
    Stage.STRANGER: {m.Hello: Stage.KNOWN},
    Stage.KNOWN: {m.Create: Stage.JOINED},
    Stage.JOINED: {
        **{
            kind: Stage.JOINED
            for kind in get_args(m.ToShard)
            if kind not in (m.Hello, m.MemoryOffer)
        },
        m.Leave: Stage.LEFT,
    },
    Stage.LEFT: {},
}
"""For each stage the messages that are legal, and the stage after each.

`server.py` handles `MemoryOffer`.
"""


class Members:
    """See the module's docstring.

    Args:
        workers: number of workers that will join.
        token: the job's secret, which every `Hello` must carry.
    """

    def __init__(self, workers: int, token: bytes) -> None:
        self.workers = workers
        self.peers: dict[int, bytes] = {}
        """The transport name of each rank that has joined."""
        self.ranks: dict[bytes, int] = {}
        self.left: list[int] = []
        """Ranks that have left, in that order."""
        self._token = token
        self._stages: dict[bytes, Stage] = {}
        self._faults = [0] * workers

    @property
    def all_here(self) -> bool:
        """Whether every worker has joined: no other peer may."""
        return len(self.peers) == self.workers

    @property
    def finished(self) -> bool:
        """Whether every worker has joined and left."""
        return self.all_here and len(self.left) == self.workers

    def next_stage(self, sender: bytes, message: m.Message) -> Stage:
        """Return the stage of a peer after a message.

        Raises:
            RemoteProtocolError: the message is not legal from this peer now.
        """
        stage = self._stages.get(sender, Stage.STRANGER)
        after = LEGAL[stage].get(type(message))
        if after is None:
            raise RemoteProtocolError(
                f"{type(message).__name__} is not legal from a peer that is {stage.value}"
            )
        return after

    def advance(self, sender: bytes, stage: Stage) -> None:
        """Set the stage of a peer, once its message has been taken."""
        self._stages[sender] = stage

    def join(self, sender: bytes, hello: m.Hello) -> None:
        """Give a peer its rank.

        Raises:
            RemoteProtocolError: the token or the rank is wrong, or the rank is taken.
        """
        if not hmac.compare_digest(hello.token, self._token):
            raise RemoteProtocolError("the token is not this job's")
        if not 0 <= hello.worker < self.workers:
            raise RemoteProtocolError(f"worker {hello.worker} is not one of {self.workers}")
        if hello.worker in self.peers:
            raise RemoteProtocolError(f"worker {hello.worker} has joined already")
        self.peers[hello.worker] = sender
        self.ranks[sender] = hello.worker

    def fault(self, sender: bytes, reason: str) -> list[Outgoing]:
        """Answer an illegal message of a known peer, up to `MAX_ANSWERED_FAULTS` times."""
        rank = self.ranks.get(sender)
        if rank is None or self._faults[rank] >= MAX_ANSWERED_FAULTS:
            return []
        self._faults[rank] += 1
        return [Outgoing(sender, m.Fault(reason))]

    def to(self, rank: int, message: m.ToWorker) -> Outgoing:
        """Address a message to a worker."""
        return Outgoing(self.peers[rank], message)

    def to_each(self, ranks: Iterable[int], message: m.ToWorker) -> Iterator[Outgoing]:
        """Address a message to these workers."""
        return (self.to(rank, message) for rank in ranks)

    def missing_for(self, rank: int, is_behind: Callable[[int, int], bool]) -> int | None:
        """Return a worker that has left although a peer needs more of it; None where there
        is none.

        Args:
            rank: of the worker that continues.
            is_behind: whether its first argument has done less than its second.
        """
        return next((gone for gone in self.left if is_behind(gone, rank)), None)
