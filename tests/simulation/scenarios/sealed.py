"""Encrypted connections with an attacker in the middle: handshakes, sealed packets, sessions that
follow each other.

Checked at each step: what is delivered is what was sent, in order, each packet once and whole, and
nothing comes after a packet that is missing. Where the attacker only adds, all is delivered. What
has opened a session opens no other one, and packets of an earlier session are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random

from ps_server.errors import PacketsMissing, RemoteProtocolError
from ps_server.keys import JobKeys
from ps_server.transport.sealed_ends import ConnectingEnd, ListeningEnd
from ps_server.transport.sealing import LARGE_BYTES, Sealer
from tests.simulation.world import Violation, World

ADDS = ("repeated", "changed copy first", "cut copy first", "part missing in copy first", "replay")
TAKES = ("dropped", "swapped")
RUN_S = 100.0
PEER = b"worker"
Packet = list[bytes]


@cache
def keys() -> JobKeys:
    """Return keys for all runs: to make them takes longer than a run. No outcome depends on them."""
    return JobKeys.new(workers=2, shards=1)


@dataclass(kw_only=True)
class _Way:
    """One direction of a connection, through the attacker."""

    world: World
    name: str
    random: Random
    deliver: Callable[[Packet], None]
    takes: bool
    """Whether the attacker takes packets out, too."""
    heard: list[Packet]
    """Packets of all sessions so far."""
    held: list[Packet] = field(default_factory=list)
    taken: int = -1
    """The first packet that does not come in its place; -1: none."""
    sent: int = 0
    arrives_s: float = 0.0

    def send(self, packet: Packet) -> None:
        """Carry a packet; the attacker may do something first."""
        number, self.sent = self.sent, self.sent + 1
        acts, draw = self.random.random() < 0.15, self.random.random()
        kinds = (*ADDS, *TAKES) if self.takes else ADDS
        kind = kinds[int(draw * len(kinds))]
        known = self.random.choice([*self.heard, packet])
        at = self.random.randrange(len(packet))
        copies = [packet]
        if acts and not self.held and self.world.deviates(f"{self.name}: packet {number} {kind}"):
            copies = self._attack(kind, packet, known, at)
            if kind in TAKES and self.taken < 0:
                self.taken = number
        if copies:
            self.heard.append(packet)  # one that was taken out may still come in its place
        for copy in (*copies, *self.held):
            self._carry(copy)
        self.held = [packet] if not copies and kind == "swapped" else []

    def _attack(self, kind: str, packet: Packet, known: Packet, at: int) -> list[Packet]:
        part = packet[at]
        changed = {
            "changed copy first": [bytes([part[0] ^ 1]) + part[1:]] if part else [b"x"],
            "cut copy first": [part[: len(part) // 2]],
            "part missing in copy first": [],
        }
        if kind in changed:
            return [[*packet[:at], *changed[kind], *packet[at + 1 :]], packet]
        if kind == "replay":
            return [known, packet]
        return [packet, packet] if kind == "repeated" else []

    def _carry(self, packet: Packet) -> None:
        self.arrives_s = max(self.arrives_s, self.world.now) + self.random.random() * 0.1
        self.world.at(self.arrives_s, self.deliver, packet)


class _Session:
    """One connection: a worker, the attacker, a shard."""

    def __init__(self, run: _Run, number: int) -> None:
        self._run = run
        self.random = run.world.stream(f"session {number}")
        self.takes = self.random.random() < 0.4
        self.worker = ConnectingEnd(keys().of_worker(0), 0)
        admitted = run.shard.admit(self.worker.first)
        if admitted is None or run.shard.admit(self.worker.first) != admitted:
            raise Violation("a worker is not admitted")
        self.number = admitted
        self.peer = PEER + b" %d" % number
        self.plans = [self._packets(), self._packets()]
        self.came: list[list[list[bytes]]] = [[], []]
        self.ways = [
            self._way(f"session {number} there", self._at_shard, run.heard[0]),
            self._way(f"session {number} back", self._at_worker, run.heard[1]),
        ]
        self.missing = [False, False]
        """Whether the shard, the worker has noticed that packets are missing."""
        self._answered = False

    def _way(self, name: str, deliver: Callable[[Packet], None], heard: list[Packet]) -> _Way:
        return _Way(
            world=self._run.world,
            name=name,
            random=self._run.world.stream(name),
            deliver=deliver,
            takes=self.takes,
            heard=heard,
        )

    def _packets(self) -> list[list[bytes]]:
        sizes = (0, 1, 9, 100, LARGE_BYTES)
        count = self.random.choice((1, 5, 12))
        return [
            [b"%d" % number, *(bytes(self.random.choice(sizes)) for _ in range(2))]
            for number in range(count)
        ]

    def begin(self) -> None:
        """Ask for the second message of the handshake, which nobody changes."""
        second = self._run.shard.knock(self.number, [memoryview(b"")])
        if second is None or self.worker.receive([memoryview(bytearray(second))]):
            raise Violation("the shard does not answer a worker that connects")
        if self._run.shard.sealer(self.peer) is not None:
            raise Violation("the shard answers a peer that has not proved that it has the keys")
        assert self.worker.sealer is not None
        self._renew_keys_after(self.random.choice((3 * LARGE_BYTES, 2**36)))
        self.ways[0].send(_sealed(self.worker.sealer, []))
        for number, frames in enumerate(self.plans[0]):
            self._run.world.after(0.1 * number, self._send, 0, frames)

    def _renew_keys_after(self, rekey_bytes: int) -> None:
        shard = self._run.shard._sessions[self.number]
        for end in (shard.sealer, shard.opener, self.worker.sealer, self.worker._opener):
            assert end is not None
            end._rekey_bytes = rekey_bytes

    def _send(self, way: int, frames: list[bytes]) -> None:
        sealer = self._run.shard.sealer(self.peer) if way else self.worker.sealer
        assert sealer is not None
        self.ways[way].send(_sealed(sealer, frames))

    def _at_shard(self, packet: Packet) -> None:
        shard = self._run.shard
        if shard.knock(self.number, _views(packet)) is not None:
            return
        try:
            frames = shard.receive(self.number, self.peer, _views(packet))
        except PacketsMissing:
            self._note_missing(0)
            self.ways[1].send(_sealed(_known(shard.sealer(self.peer)), []))
        except RemoteProtocolError:
            return
        else:
            self._deliver(0, [bytes(frame) for frame in frames])
        if not self._answered and not self.missing[0]:
            self._answered = True
            for number, frames_back in enumerate(self.plans[1]):
                self._run.world.after(0.07 * number, self._send, 1, frames_back)

    def _at_worker(self, packet: Packet) -> None:
        if self.missing[1]:  # it is lost: its owner closes it
            return
        try:
            frames = self.worker.receive(_views(packet))
        except PacketsMissing:
            if self.ways[1].taken < 0 and not self.missing[0]:
                raise Violation("a worker misses packets that were not taken out") from None
            self.missing[1] = True
        except RemoteProtocolError:
            return
        else:
            self._deliver(1, [bytes(frame) for frame in frames])

    def _note_missing(self, way: int) -> None:
        if self.ways[way].taken < 0:
            raise Violation("packets are missed that were not taken out")
        self.missing[way] = True

    def _deliver(self, way: int, frames: list[bytes]) -> None:
        if not frames:
            return  # the first packet, which proves that the worker has the keys
        if self.missing[way]:
            raise Violation("a packet is delivered after one that is missing")
        came = self.came[way]
        if len(came) == len(self.plans[way]) or frames != self.plans[way][len(came)]:
            raise Violation(f"packet {len(came)} of direction {way} is not what was sent")
        came.append(frames)

    def judge(self) -> None:
        """Check what has come at the end."""
        for way, (came, sent) in enumerate(zip(self.came, self.plans, strict=True)):
            taken = self.ways[way].taken
            began = way == 0 or self._answered
            if began and taken < 0 and not any(self.missing) and came != sent:
                raise Violation(f"{len(came)} of {len(sent)} packets of direction {way} came")
            if taken >= 0 and len(came) > taken:
                raise Violation("more has come than was sent before a packet was taken out")
            if 0 <= taken < self.ways[way].sent - 2 and not any(self.missing):
                raise Violation("nobody notices that a packet is missing")
        if self._answered and self._run.shard.admit(self.worker.first) is not None:
            raise Violation("a first message is admitted again after it has led to a connection")


class _Run:
    """The sessions of one run, one after the other, with one shard."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.shard = ListeningEnd(keys().of_shard(0))
        self.heard: tuple[list[Packet], list[Packet]] = ([], [])

    def run(self) -> None:
        """Run them."""
        for number in range(self.world.stream("sessions").choice((1, 2, 3))):
            session = _Session(self, number)
            session.begin()
            self.world.run(lambda: False, RUN_S)
            session.judge()


def _sealed(sealer: Sealer, frames: list[bytes]) -> Packet:
    number = sealer.number
    parts = sealer.seal(frames, lambda size: memoryview(bytearray(size)))
    return [number, *map(bytes, parts)]


def _views(packet: Packet) -> list[memoryview]:
    return [memoryview(bytearray(part)) for part in packet]


def _known(sealer: Sealer | None) -> Sealer:
    if sealer is None:
        raise Violation("a shard cannot answer a peer that has proved that it has the keys")
    return sealer


def simulate(world: World) -> None:
    """Run a seed."""
    _Run(world).run()
