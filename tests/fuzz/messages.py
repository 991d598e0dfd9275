"""Legal and hostile messages of a job, and the measurement of memory under them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import msgpack
import numpy as np
import psutil

from poseidon.exchange.factors.factor_rounds import FactorTable
from ps_server.protocol import messages as m
from ps_server.protocol.frames import encode
from ps_server.protocol.row_settings import RowRule, RowRuleKind, RowTableSpec
from ps_server.protocol.settings import Keeping, Rule, RuleKind, StoreSpec, TableSpec
from tests.fuzz.mutation import BINARY, mutate
from tests.support.held_memory import held_bytes

TOKEN = b"the secret of this job"
WORKERS = 2
LONGEST_LIFE = 2_000
STORE = StoreSpec(
    workers=WORKERS,
    shards=1,
    tables=(
        TableSpec(name="conv", size=6, rows=2, rule=Rule(kind=RuleKind.ADAM, momentum=0.9)),
        TableSpec(name="mean", size=3, keeping=Keeping.AVERAGE),
        TableSpec(name="ip", size=4, staleness=2),
        TableSpec(name="fc", size=4, keeping=Keeping.COPY),
    ),
)
ROW_TABLE = RowTableSpec(name="users", rows=5, dim=2, rule=RowRule(kind=RowRuleKind.ADAM))
ROWS = np.array([1, 4], np.uint32)
FACTORS = (
    FactorTable(name="fc", outputs=3, inputs=2),
    FactorTable(name="fc8", outputs=1, inputs=5),
)
Packet = list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a run.

    Attributes:
        messages: number of messages sent.
        refused: number of messages refused without a change of state.
        growth_bytes: growth of the session, with all that it refers to, from the middle to the end.
        resident_growth_bytes: growth of the resident memory of the process.
    """

    messages: int
    refused: int
    growth_bytes: int
    resident_growth_bytes: int


class Memory:
    """The memory of a session and of this process at the middle and at the end of the messages."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._resident: list[int] = []

    def measure(self, session: object) -> None:
        """Record the memory in use, without garbage."""
        gc.collect()
        self._held.append(held_bytes(session))
        self._resident.append(psutil.Process().memory_info().rss)

    def report(self, messages: int, refused: int) -> Report:
        """Return the result of the run, from the first and the last measurement."""
        return Report(
            messages=messages,
            refused=refused,
            growth_bytes=self._held[-1] - self._held[0],
            resident_growth_bytes=self._resident[-1] - self._resident[0],
        )


@dataclass(frozen=True, slots=True)
class Lives:
    """Messages shared among sessions, which are replaced one after the other: a session may have
    left, or be far ahead.

    The middle of the messages is the end of a session, as the end is: what a session may legally
    hold at its end does not count as growth.
    """

    count: int
    length: int

    @classmethod
    def of(cls, messages: int) -> Lives:
        """Return lives for at least a number of messages."""
        pairs = -(-messages // (2 * LONGEST_LIFE))
        return cls(2 * pairs, -(-messages // (2 * pairs)))

    @property
    def messages(self) -> int:
        """Number of messages of all sessions together."""
        return self.count * self.length

    def begins(self, number: int) -> bool:
        """Return True if a session begins with this message."""
        return number % self.length == 0

    def ends_half(self, number: int) -> bool:
        """Return True if half, or all, of the messages end with this one."""
        return (number + 1) % (self.messages // 2) == 0


class Hostile:
    """Makes packets that resemble legal ones more or less."""

    def __init__(self, random: Random, seen: Sequence[Packet]) -> None:
        self._random = random
        self._seen = list(seen)

    def packet(self) -> Packet:
        """Return a replay, a mutated packet, pieces of several, or noise."""
        random = self._random
        match random.randrange(8):
            case 0:
                return list(random.choice(self._seen))
            case 1:
                return [
                    random.randbytes(random.choice((0, 1, 7, 60)))
                    for _ in range(random.randrange(4))
                ]
            case 2:
                pieces = [frame for _ in range(2) for frame in random.choice(self._seen)]
                return random.sample(pieces, random.randint(1, len(pieces)))
            case 3 | 4 | 5:
                return self._other_fields(list(random.choice(self._seen)))
            case _:
                packet = list(random.choice(self._seen))
                index = random.randrange(len(packet))
                packet[index] = mutate(packet[index], random, BINARY)
                return packet

    def _other_fields(self, packet: Packet) -> Packet:
        """Change one or two fields of a legal header: well-formed msgpack with another meaning."""
        header = msgpack.unpackb(packet[0])
        for _ in range(self._random.randint(1, 2)):
            header[self._random.randrange(len(header))] = self._value()
        return [msgpack.packb(header), *packet[1:]]

    def _value(self) -> object:
        random = self._random
        choices: tuple[object, ...] = (
            random.randrange(6),
            random.randrange(6),
            random.choice((-1, 2**31, 2**40, 2**62, 2**64 - 1)),
            random.choice((0.5, float("nan"), float("inf"), -1e300)),
            random.choice(
                (b"", b"x" * 9, TOKEN, "text", "float16", None, True, [], [1, 2], {}, {"a": 1})
            ),
        )
        return random.choice(choices)


def peer(rank: int) -> bytes:
    """Return a worker's name on the transport."""
    return b"worker %d" % rank


def _joining(rank: int) -> list[m.Message]:
    first: list[m.Message] = [m.Hello(rank, TOKEN), m.Create(STORE)]
    sizes = ((0, 0, 3), (0, 1, 3), (1, 0, 3), (2, 0, 4), (3, 0, 4))
    firsts: list[m.Message] = [m.Initial(t, c, [np.ones(size, np.float32)]) for t, c, size in sizes]
    return [*first, *(firsts if rank == 0 else []), m.CreateRows(0, 1, ROW_TABLE)]


def _iteration(rank: int, clock: int) -> list[m.Message]:
    def values(size: int) -> m.Array:
        return np.full(size, (rank + 1) / (clock + 2), np.float32)

    messages: list[m.Message] = [m.Push(0, chunk, clock, 0.1, values(3)) for chunk in range(2)]
    messages += [
        m.Push(1, 0, clock, 0.1, values(3)),
        m.Push(2, 0, clock, 0.0, values(4)),
        m.Clock(clock + 1),
    ]
    messages += [m.Gather(clock, b"payload %d" % rank), m.GetHistory(0, 0), m.Get(0, 1, clock + 1)]
    messages += [
        m.GetRows(0, clock, clock, ROWS),
        m.PushRows(0, clock, 0.1, ROWS, values(4)),
        m.ReadRows(0, 0, 5),
    ]
    if rank == 0:
        messages += [m.Signal(m.SignalKind.SNAPSHOT, clock + 9)]
    return messages


def script(iterations: int) -> list[tuple[bytes, Packet]]:
    """Return the legal messages of two workers, a packet for each."""
    sent: list[tuple[bytes, Packet]] = []
    for rank in range(WORKERS):
        sent += [(peer(rank), packet_of(message)) for message in _joining(rank)]
    for clock in range(iterations):
        for rank in range(WORKERS):
            sent += [(peer(rank), packet_of(message)) for message in _iteration(rank, clock)]
    return sent


def packet_of(message: m.Message) -> Packet:
    return [bytes(frame) for frame in encode(message)]
