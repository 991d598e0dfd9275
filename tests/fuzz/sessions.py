"""Shards, workers and the lines of factors under random, spoiled and replayed messages.

    python -m tests.fuzz.sessions --messages 1000000 --seed 1

Four targets share the messages. A shard that strangers speak to must send its workers the same bytes as one that is left
in peace, and keep nothing of the strangers. A shard whose own workers have gone mad, a worker's session and a
line of factors must refuse what is not legal without a change of state. Whatever comes, nothing else may be raised, and
no target may hold more memory at the end than at the half.

Law: every draw comes from the seed; a run is repeated by its number.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import msgpack
import numpy as np
import psutil

from poseidon.exchange.factors.peers import Peers
from poseidon.exchange.factors.session import FactorSession, FactorTable, Pair
from poseidon.exchange.factors.wire import Join
from poseidon.exchange.factors.wire import encode as encode_factors
from ps_server.errors import PeerLost, RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.session import Session
from ps_server.protocol.settings import Keeping, Rule, RuleKind, StoreSpec, TableSpec
from ps_server.protocol.shard import Shard
from ps_server.protocol.wire import decode, encode
from ps_server.server import Server
from ps_server.transport.base import Frames
from tests.fuzz.mutation import BINARY, mutate
from tests.support.fingerprint import fingerprint
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
FACTORS = (FactorTable(name="fc", outputs=3, inputs=2), FactorTable(name="fc8", outputs=1, inputs=5))
Packet = list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of a run.

    Attributes:
        messages: how many were thrown.
        refused: of them, without a change of state.
        growth_bytes: what the session, all that it refers to included, holds at the end beyond that at the half.
        resident_growth_bytes: the same of the whole process, in pages of the system.
    """

    messages: int
    refused: int
    growth_bytes: int
    resident_growth_bytes: int


class Memory:
    """What a session, and this process, hold at the half of the messages and at their end."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._resident: list[int] = []

    def look(self, session: object) -> None:
        """Remember what is held now, garbage apart."""
        gc.collect()
        self._held.append(held_bytes(session))
        self._resident.append(psutil.Process().memory_info().rss)

    def report(self, messages: int, refused: int) -> Report:
        """What came of the run, by the first look and the last."""
        return Report(
            messages=messages,
            refused=refused,
            growth_bytes=self._held[-1] - self._held[0],
            resident_growth_bytes=self._resident[-1] - self._resident[0],
        )


@dataclass(frozen=True, slots=True)
class Lives:
    """Messages shared among sessions, each used up and replaced: one may have been told to leave, or be far ahead.

    The half of the messages is the end of a session's life, as the end is: what a session may legally hold at its end does
    not count as growth.
    """

    count: int
    length: int

    @classmethod
    def of(cls, messages: int) -> Lives:
        """At least so many messages."""
        pairs = -(-messages // (2 * LONGEST_LIFE))
        return cls(2 * pairs, -(-messages // (2 * pairs)))

    @property
    def messages(self) -> int:
        """Of all together."""
        return self.count * self.length

    def born(self, number: int) -> bool:
        """Whether a session's life begins with this message."""
        return number % self.length == 0

    def at_a_half(self, number: int) -> bool:
        """Whether the half, or all, of the messages end with this one."""
        return (number + 1) % (self.messages // 2) == 0


class Hostile:
    """Makes packets that resemble true ones more or less."""

    def __init__(self, random: Random, seen: Sequence[Packet]) -> None:
        self._random = random
        self._seen = list(seen)

    def packet(self) -> Packet:
        """A replay, a spoiled packet, pieces of several, or noise."""
        random = self._random
        match random.randrange(8):
            case 0:
                return list(random.choice(self._seen))
            case 1:
                return [random.randbytes(random.choice((0, 1, 7, 60))) for _ in range(random.randrange(4))]
            case 2:
                pieces = [frame for _ in range(2) for frame in random.choice(self._seen)]
                return random.sample(pieces, random.randint(1, len(pieces)))
            case 3 | 4 | 5:
                return self._other_fields(list(random.choice(self._seen)))
            case _:
                packet = list(random.choice(self._seen))
                place = random.randrange(len(packet))
                packet[place] = mutate(packet[place], random, BINARY)
                return packet

    def _other_fields(self, packet: Packet) -> Packet:
        """A true header with a field or two drawn anew: msgpack that is well formed and means something else."""
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
            random.choice((b"", b"x" * 9, TOKEN, "text", "float16", None, True, [], [1, 2], {}, {"a": 1})),
        )
        return random.choice(choices)


class Scripted:
    """A `ServerTransport` that hands over what a script says and remembers a digest of what each peer is sent."""

    address = "scripted"
    refused = 0
    connections = WORKERS
    finish: Callable[[], None]

    batches: Iterator[list[tuple[bytes, Frames]]]

    def __init__(self) -> None:
        self._sent: dict[bytes, hashlib._Hash] = {}

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        """The next batch; without one the server is asked to stop."""
        batch = next(self.batches, None)
        if batch is None:
            self.finish()
        return batch or []

    def blocks(self, peer: bytes) -> bool:
        """It never does."""
        return False

    def send(self, peer: bytes, frames: Frames) -> bool:
        """Count it in."""
        digest = self._sent.setdefault(peer, hashlib.sha256())
        for frame in frames:
            digest.update(b"%d:" % memoryview(frame).nbytes)
            digest.update(frame)
        return True

    @property
    def sent(self) -> dict[bytes, bytes]:
        """A digest of all that each peer was sent, frame by frame."""
        return {peer: digest.digest() for peer, digest in self._sent.items()}

    def admit_no_more(self) -> None:
        """Nothing to do."""

    def wake(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def peer(rank: int) -> bytes:
    """A worker's name on the transport."""
    return b"worker %d" % rank


def _joining(rank: int) -> list[m.Message]:
    first: list[m.Message] = [m.Hello(rank, TOKEN), m.Create(STORE)]
    sizes = ((0, 0, 3), (0, 1, 3), (1, 0, 3), (2, 0, 4), (3, 0, 4))
    firsts: list[m.Message] = [m.Initial(t, c, [np.ones(size, np.float32)]) for t, c, size in sizes]
    return first + (firsts if rank == 0 else [])


def _iteration(rank: int, clock: int) -> list[m.Message]:
    def values(size: int) -> m.Array:
        return np.full(size, (rank + 1) / (clock + 2), np.float32)

    messages: list[m.Message] = [m.Push(0, chunk, clock, 0.1, values(3)) for chunk in range(2)]
    messages += [m.Push(1, 0, clock, 0.1, values(3)), m.Push(2, 0, clock, 0.0, values(4)), m.Clock(clock + 1)]
    messages += [m.Gather(clock, b"payload %d" % rank), m.GetHistory(0, 0), m.Get(0, 1, clock + 1)]
    if rank == 0:
        messages += [m.Store(3, 0, clock + 1, values(4)), m.Signal(m.SignalKind.SNAPSHOT, clock + 9)]
    return messages


def script(iterations: int) -> list[tuple[bytes, Packet]]:
    """What two workers in their right mind say: a packet a message."""
    said: list[tuple[bytes, Packet]] = []
    for rank in range(WORKERS):
        said += [(peer(rank), _packet(message)) for message in _joining(rank)]
    for clock in range(iterations):
        for rank in range(WORKERS):
            said += [(peer(rank), _packet(message)) for message in _iteration(rank, clock)]
    return said


def _packet(message: m.Message) -> Packet:
    return [bytes(frame) for frame in encode(message)]


def a_server() -> tuple[Server, Scripted]:
    """A shard's server, which stops when the script that its transport is given ends."""
    transport = Scripted()
    server = Server(Shard(0, WORKERS, TOKEN), transport)
    transport.finish = server.stop
    return server, transport


def strangers_at_a_shard(messages: int, random: Random) -> Report:
    """Between any two packets of the job come many of strangers, who know all but the secret."""
    said = script(iterations=40)
    known = [packet for _, packet in said if packet[0] != _packet(m.Hello(0, TOKEN))[0]]
    known = [packet for packet in known if TOKEN not in b"".join(packet)] + [_packet(m.Hello(0, b"a guess"))]
    hostile = Hostile(random, known)
    share = messages // len(said) + 1
    thrown, memory = 0, Memory()

    def batches() -> Iterator[list[tuple[bytes, Frames]]]:
        nonlocal thrown
        for number, (name, packet) in enumerate(said):
            if number in (len(said) // 2, len(said) - 1):
                memory.look((server.shard, server._queues, server._meter))
            for _ in range(share):
                yield [(b"stranger %d" % random.randrange(1 << 60), _without_secret(hostile.packet()))]
            thrown += share
            yield [(name, packet)]

    peaceful, told_in_peace = a_server()
    told_in_peace.batches = iter([[entry] for entry in said])
    peaceful.serve()
    server, transport = a_server()
    transport.batches = batches()
    server.serve()
    assert transport.sent == told_in_peace.sent, "strangers changed what the workers are told"
    assert fingerprint(server.shard._cells) == fingerprint(peaceful.shard._cells)
    assert set(server._queues) == set(transport.sent) == {peer(0), peer(1)}, "a stranger was remembered"
    assert set(server.shard._members._stages) == {peer(0), peer(1)}
    return memory.report(thrown, server.shard.counts.faults)


def _without_secret(packet: Packet) -> Packet:
    return [frame.replace(TOKEN, b"?" * len(TOKEN)) for frame in packet]


def mad_workers(messages: int, random: Random) -> Report:
    """The workers say anything; what is refused has changed nothing."""
    said = script(iterations=3)
    hostile = Hostile(random, [packet for _, packet in said])
    shard, lives = _joined(said), Lives.of(messages)
    memory, refused = Memory(), 0
    for number in range(lives.messages):
        if lives.born(number):
            shard = _joined(said)
        refused += _told_by_a_worker(shard, hostile.packet(), random)
        if lives.at_a_half(number):
            memory.look(shard)
    return memory.report(lives.messages, refused)


def _told_by_a_worker(shard: Shard, packet: Packet, random: Random) -> int:
    """How many messages of it were refused."""
    try:
        received = decode(packet)
    except RemoteProtocolError:
        return 1
    refused, before = 0, fingerprint(shard)
    for message, _ in received:
        faults = shard.counts.faults
        shard.handle(peer(random.randrange(WORKERS)), message)
        after = fingerprint(shard)
        if shard.counts.faults > faults:
            refused += 1
            assert after == before, f"{message} was refused and changed something"
        before = after
    return refused


def _joined(said: Sequence[tuple[bytes, Packet]]) -> Shard:
    shard = Shard(0, WORKERS, TOKEN)
    for name, packet in said[: len(said) // 2]:
        for message, _ in decode(packet):
            shard.handle(name, message)
    return shard


def a_mad_shard(messages: int, random: Random) -> Report:
    """A worker's session is told anything; what is refused has changed nothing."""
    answers = _answers()
    hostile = Hostile(random, answers)
    session, lives = _session(answers), Lives.of(messages)
    memory, refused = Memory(), 0
    for number in range(lives.messages):
        if lives.born(number):
            session = _session(answers)
        refused += _told_by_the_shard(session, hostile.packet())
        if lives.at_a_half(number):
            memory.look(session)
    return memory.report(lives.messages, refused)


def _told_by_the_shard(session: Session, packet: Packet) -> int:
    """How many messages of it were refused."""
    try:
        received = decode(packet)
    except RemoteProtocolError:
        return 1
    refused = 0
    for message, _ in received:
        before = fingerprint(session)
        try:
            if isinstance(message, m.Value):
                session.values.land(0, message)
            session.receive(0, message)
        except (RemoteProtocolError, PeerLost):  # it may be told that another worker has gone, too
            refused += 1
            assert fingerprint(session) == before, f"{message} was refused and changed something"
    return refused


def _answers() -> list[Packet]:
    """All that a shard has said to worker 1, a packet a message."""
    shard, packets = Shard(0, WORKERS, TOKEN), []
    for name, packet in script(iterations=3):
        for message, _ in decode(packet):
            packets += [_packet(out.message) for out in shard.handle(name, message) if out.peer == peer(1)]
    return packets


def _session(answers: Sequence[Packet]) -> Session:
    session = Session(1, STORE, TOKEN)
    session.start(lambda table: [])
    for packet in answers[:6]:
        for message, _ in decode(packet):
            session.receive(0, message)
    return session


def at_a_line_of_factors(messages: int, random: Random) -> Report:
    """Strangers, and a worker that has greeted, say anything to another worker."""

    def pair(table: FactorTable) -> Pair:
        return Pair(np.ones((2, table.outputs), np.float32), np.ones((2, table.inputs), np.float32))

    own = FactorSession(1, WORKERS, FACTORS)
    sent = [own.send(table, pair(spec)) for _ in range(3) for table, spec in enumerate(FACTORS)]
    true = [[bytes(f) for f in encode_factors(said)] for said in (*sent, Join(1, b"a guess"))]
    hostile = Hostile(random, true)
    memory, refused, half = Memory(), 0, -(-messages // 2)
    peers = Peers(FactorSession(0, WORKERS, FACTORS), listen="tcp://127.0.0.1:0", token=TOKEN)
    try:
        peers._handle(peer(1), [bytes(f) for f in encode_factors(Join(1, TOKEN))])
        for number in range(2 * half):
            name = random.choice((peer(1), b"stranger %d" % random.randrange(1 << 60)))
            refused += _told_by_a_peer(peers, name, hostile.packet())
            if (number + 1) % half == 0:
                memory.look((peers.session, peers._ranks, peers._left, peers._outboxes))
    finally:
        peers.close()
    return memory.report(2 * half, refused)


def _told_by_a_peer(peers: Peers, name: bytes, packet: Packet) -> int:
    """Whether it was refused: 1 or 0."""
    before = fingerprint((peers.session, peers._ranks))
    try:
        peers._handle(name, packet)
    except RemoteProtocolError:
        assert fingerprint((peers.session, peers._ranks)) == before
        return 1
    assert name == peer(1), "a stranger was listened to"
    return 0


TARGETS: dict[str, Callable[[int, Random], Report]] = {
    "strangers at a shard": strangers_at_a_shard,
    "mad workers at a shard": mad_workers,
    "a mad shard at a worker": a_mad_shard,
    "anybody at a line of factors": at_a_line_of_factors,
}


def main(arguments: list[str] | None = None) -> int:
    """Throw many messages; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.sessions", description=__doc__.split("\n")[0])
    parser.add_argument("--messages", type=int, default=1_000_000, help="over all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", choices=TARGETS, help="this one alone, with its share of the messages")
    flags = parser.parse_args(arguments)
    total: Counter[str] = Counter()
    for name in [flags.target] if flags.target else TARGETS:
        began_s = time.monotonic()
        report = TARGETS[name](flags.messages // len(TARGETS), Random(f"{flags.seed} {name}"))
        total.update(messages=report.messages, refused=report.refused)
        print(
            f"{name}: {report.messages} messages, {report.refused} refused, growth of the session "
            f"{report.growth_bytes} bytes, of the process {report.resident_growth_bytes} bytes, "
            f"{time.monotonic() - began_s:.0f} s",
            flush=True,
        )
    print(f"together {total['messages']} messages, {total['refused']} refused; nothing else was raised")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
