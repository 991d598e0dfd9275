"""Faults and their moments, drawn from a seed, so that a run can be repeated.

Law: pure. A fault does not depend on the job.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The kind of a fault."""

    WORKER = "kill -9 a worker"
    SHARD = "kill -9 a shard"
    CLIENT = "kill -9 all processes of a client"
    STOPPED = "stop a worker (SIGSTOP)"
    LAUNCHER = "kill -9 the launcher"
    AGENT = "kill -9 a host's agent"
    HOST = "a host loses its power"
    CUT_1 = "a link is down for 1 s"
    CUT_5 = "a link is down for 5 s"
    CUT_60 = "a link is down for 60 s"


LOCAL = (Kind.WORKER, Kind.SHARD, Kind.CLIENT, Kind.STOPPED, Kind.LAUNCHER)
FAR = (
    Kind.WORKER, Kind.SHARD, Kind.CLIENT, Kind.AGENT, Kind.HOST, Kind.CUT_1, Kind.CUT_5, Kind.CUT_60, Kind.LAUNCHER,
)  # fmt: skip
STARTING = 0.1
CUT_S = {Kind.CUT_1: 1.0, Kind.CUT_5: 5.0, Kind.CUT_60: 60.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        kind: the kind of the fault.
        client: the client that it hits.
        after: the moment, as a part of the iterations; below `STARTING` while the job starts.
        delay_s: delay after that moment.
    """

    kind: Kind
    client: int
    after: float
    delay_s: float


def draw(seed: int, kinds: tuple[Kind, ...], clients: int) -> Fault:
    """Return the fault of a seed. Kinds come in turn; the moment and the client are random.

    Args:
        seed: 0, 1, ...
        kinds: the kinds to choose from.
        clients: number of clients.
    """
    dice = random.Random(seed)
    return Fault(
        kind=kinds[seed % len(kinds)],
        client=dice.randrange(clients),
        after=dice.random(),
        delay_s=dice.uniform(0, 0.3),
    )
