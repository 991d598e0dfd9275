"""Shards, workers and factor connections under random, mutated and replayed messages.

    python -m tests.fuzz.sessions --messages 1000000 --seed 1

Four targets share the messages. A shard that receives messages of unauthenticated peers must send
its workers the same bytes as an undisturbed one, and keep nothing of those peers. A shard with
faulty workers, a worker's session with a faulty shard, and a factor connection must refuse illegal
messages without a change of state. No other exception may be raised, and no target may hold more
memory at the end than at the middle.

Law: every draw comes from the seed; a run is repeated by its number.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random

import numpy as np

from poseidon.exchange.factors.factor_rounds import FactorPeers, FactorSession, FactorTable, Pair
from poseidon.exchange.worker_links import LEAVE_MESSAGE, join_message
from ps_server.errors import PeerLost, RemoteProtocolError
from ps_server.network import Network
from ps_server.protocol import messages as m
from ps_server.protocol.frames import decode
from ps_server.protocol.shard import Shard
from ps_server.protocol.worker_session import Session
from ps_server.server import Server
from ps_server.transport.base import Frames
from tests.fuzz.messages import (
    FACTORS,
    ROW_TABLE,
    ROWS,
    STORE,
    TOKEN,
    WORKERS,
    Hostile,
    Lives,
    Memory,
    Packet,
    Report,
    packet_of,
    peer,
    script,
)
from tests.support.factor_frames import frames_of, pair_of
from tests.support.fingerprint import fingerprint


class Scripted:
    """A `ServerTransport` that delivers a script of messages and records a digest of the bytes
    sent to each peer.
    """

    address = "scripted"
    refused = 0
    connections = WORKERS
    finish: Callable[[], None]

    batches: Iterator[list[tuple[bytes, Frames]]]

    def __init__(self) -> None:
        self.sent: Counter[bytes] = Counter()
        """The sum of the digests of all frames sent to each peer: histories leave when a shard has
        nothing else to do, so their order depends on the time.
        """

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        """Return the next batch; without one, stop the server."""
        batch = next(self.batches, None)
        if batch is None:
            self.finish()
        return batch or []

    def blocks(self, peer: bytes) -> bool:
        """Return False."""
        return False

    def send(self, peer: bytes, frames: Frames) -> bool:
        """Add frames to the sum."""
        for frame in frames:
            self.sent[peer] += int.from_bytes(hashlib.sha256(frame).digest())
        return True

    def admit_no_more(self) -> None:
        """Do nothing."""

    def known(self, peer: bytes) -> None:
        """Do nothing."""

    def wake(self) -> None:
        """Do nothing."""

    def close(self, *, drops: bool = False) -> None:
        """Do nothing."""


def scripted_server() -> tuple[Server, Scripted]:
    """Return a shard's server, which stops at the end of its transport's script."""
    transport = Scripted()
    server = Server(Shard(0, WORKERS, TOKEN), transport)
    transport.finish = server.stop
    return server, transport


def unauthenticated_at_a_shard(messages: int, random: Random) -> Report:
    """Send many packets of unauthenticated peers, who know all but the secret, between any two
    of the job.
    """
    sent = script(iterations=40)
    known = [packet for _, packet in sent if packet[0] != packet_of(m.Hello(0, TOKEN))[0]]
    known = [packet for packet in known if TOKEN not in b"".join(packet)] + [
        packet_of(m.Hello(0, b"a guess"))
    ]
    hostile = Hostile(random, known)
    share = messages // len(sent) + 1
    sent_count, memory = 0, Memory()

    def batches() -> Iterator[list[tuple[bytes, Frames]]]:
        nonlocal sent_count
        for number, (name, packet) in enumerate(sent):
            if number in (len(sent) // 2, len(sent) - 1):
                memory.measure((server.shard, server._queues, server._meter))
            for _ in range(share):
                yield [
                    (b"stranger %d" % random.randrange(1 << 60), _without_secret(hostile.packet()))
                ]
            sent_count += share
            yield [(name, packet)]

    undisturbed, expected = scripted_server()
    expected.batches = iter([[entry] for entry in sent])
    undisturbed.serve()
    server, transport = scripted_server()
    transport.batches = batches()
    server.serve()
    assert transport.sent == expected.sent, (
        "unauthenticated messages changed the answers to workers"
    )
    assert fingerprint(server.shard.present.cells) == fingerprint(undisturbed.shard.present.cells)
    assert set(server._queues) == set(transport.sent) == {peer(0), peer(1)}, (
        "an unauthenticated peer was remembered"
    )
    assert set(server.shard.members._stages) == {peer(0), peer(1)}
    return memory.report(sent_count, server.shard.counts.faults)


def _without_secret(packet: Packet) -> Packet:
    return [frame.replace(TOKEN, b"?" * len(TOKEN)) for frame in packet]


def faulty_workers(messages: int, random: Random) -> Report:
    """Send any message as a worker; a refused one changes nothing."""
    sent = script(iterations=3)
    hostile = Hostile(random, [packet for _, packet in sent])
    shard, lives = _joined(sent), Lives.of(messages)
    memory, refused = Memory(), 0
    for number in range(lives.messages):
        if lives.begins(number):
            shard = _joined(sent)
        refused += _send_to_shard(shard, hostile.packet(), random)
        if lives.ends_half(number):
            memory.measure(shard)
    return memory.report(lives.messages, refused)


def _send_to_shard(shard: Shard, packet: Packet, random: Random) -> int:
    """Return the number of its messages that were refused."""
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


def _joined(sent: Sequence[tuple[bytes, Packet]]) -> Shard:
    shard = Shard(0, WORKERS, TOKEN)
    for name, packet in sent[: len(sent) // 2]:
        for message, _ in decode(packet):
            shard.handle(name, message)
    return shard


def faulty_shard(messages: int, random: Random) -> Report:
    """Send any message to a worker's session; a refused one changes nothing."""
    answers = _answers()
    hostile = Hostile(random, answers)
    session, lives = _session(answers), Lives.of(messages)
    memory, refused = Memory(), 0
    for number in range(lives.messages):
        if lives.begins(number):
            session = _session(answers)
        refused += _send_to_session(session, hostile.packet())
        if lives.ends_half(number):
            memory.measure(session)
    return memory.report(lives.messages, refused)


def _send_to_session(session: Session, packet: Packet) -> int:
    """Return the number of its messages that were refused."""
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
        except (RemoteProtocolError, PeerLost):
            # a message may also say that another worker has gone
            refused += 1
            assert fingerprint(session) == before, f"{message} was refused and changed something"
    return refused


def _answers() -> list[Packet]:
    """Return all messages of a shard to worker 1, a packet for each."""
    shard, packets = Shard(0, WORKERS, TOKEN), []
    for name, packet in script(iterations=3):
        for message, _ in decode(packet):
            packets += [
                packet_of(out.message) for out in shard.handle(name, message) if out.peer == peer(1)
            ]
    return packets


def _session(answers: Sequence[Packet]) -> Session:
    session = Session(1, STORE, TOKEN)
    session.start(lambda table: [])
    session.rows.create(ROW_TABLE)
    session.rows.request(0, ROWS)
    session.rows.read(0, 0, 0, 5)
    for packet in answers[:6]:
        for message, _ in decode(packet):
            session.receive(0, message)
    return session


def factor_connection(messages: int, random: Random) -> Report:
    """Send any message to a worker, as an unauthenticated peer or as a worker that has joined."""

    def pair_for(table: FactorTable) -> Pair:
        ones = np.ones((2, table.outputs), np.float32), np.ones((2, table.inputs), np.float32)
        return pair_of(*ones)

    own = FactorSession(1, WORKERS, FACTORS)
    pairs = [(table, pair_for(spec)) for _ in range(3) for table, spec in enumerate(FACTORS)]
    sent = [frames_of(table, own.send(table, pair), pair) for table, pair in pairs]
    messages_of_peers = (*sent, join_message(1, b"a guess"), LEAVE_MESSAGE)
    legal = [[bytes(frame) for frame in frames] for frames in messages_of_peers]
    hostile = Hostile(random, legal)
    memory, refused, half = Memory(), 0, -(-messages // 2)
    peers = FactorPeers(FactorSession(0, WORKERS, FACTORS), Network(size=WORKERS, token=TOKEN))
    try:
        links = peers.links
        links._handle(peer(1), join_message(1, TOKEN))
        for number in range(2 * half):
            name = random.choice((peer(1), b"stranger %d" % random.randrange(1 << 60)))
            refused += _send_to_peers(peers, name, hostile.packet())
            if (number + 1) % half == 0:
                memory.measure((peers.session, links._ranks, links.left, links._out.boxes))
    finally:
        peers.links.close()
    return memory.report(2 * half, refused)


def _send_to_peers(peers: FactorPeers, name: bytes, packet: Packet) -> int:
    """Return 1 if the packet was refused, otherwise 0."""
    before = fingerprint((peers.session, peers.links._ranks))
    try:
        peers.links._handle(name, packet)
    except RemoteProtocolError:
        assert fingerprint((peers.session, peers.links._ranks)) == before
        return 1
    assert name == peer(1), "an unauthenticated peer was accepted"
    return 0


TARGETS: dict[str, Callable[[int, Random], Report]] = {
    "unauthenticated peers at a shard": unauthenticated_at_a_shard,
    "faulty workers at a shard": faulty_workers,
    "a faulty shard at a worker": faulty_shard,
    "any peer at a factor connection": factor_connection,
}


def main(arguments: list[str] | None = None) -> int:
    """Send many messages. Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.sessions", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--messages", type=int, default=1_000_000, help="over all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--target", choices=TARGETS, help="this target alone, with its part of the messages"
    )
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
    print(
        f"together {total['messages']} messages, {total['refused']} refused; nothing else was "
        "raised"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
