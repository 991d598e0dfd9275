"""A simulated network: links that keep their order, and transports over them.

A frame waits with its sender until the link takes it, and only then is copied, as a socket does: a
sender that writes to a buffer too early is seen. Then it travels for its latency and its bytes.
Deviations: a frame is late, a host's links carry nothing for a while, a connection is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ps_server.errors import PeerLost
from ps_server.keys import Keyring
from ps_server.transport.base import Frames
from tests.simulation.processes import Loop, Process
from tests.simulation.world import World

ADDRESS = "tcp://simulated/"
"""Of what listens, before the name of its end."""
WAITING = 2
"""Messages that wait with a sender; more are not taken."""
RELAYED = 500
"""The same where the channel is relayed: pipes and windows take some ten thousand bytes."""
TAKEN_S = 0.0001
"""Most seconds until an idle link takes a frame."""
RESET_S = 0.001
SILENCE_S = 10.0
"""How long a host is silent until its connections count as lost."""


class End:
    """One end of the links of a process: what has come, and whom to wake."""

    def __init__(self, process: Process, name: str, *, relayed: bool = False) -> None:
        self.process = process
        self.name = name
        self.relayed = relayed
        """Whether another process (sshd) carries what it sends: then much may wait, and unread
        messages reset nothing when it closes."""
        self.inbox: deque[tuple[str, list[bytearray]]] = deque()
        self.lost: list[str] = []
        self.loop: Loop | None = None
        self.sending: Loop | None = None
        """That waits for room on the links; None: `loop` does."""
        self.open = True

    def wake_sender(self) -> None:
        """Let what sends look: a link has room."""
        loop = self.sending or self.loop
        if loop is not None:
            loop.wake()

    def wake(self) -> None:
        """Let the owner's loop look."""
        if self.loop is not None:
            self.loop.wake()

    def take(self, most: int) -> list[tuple[str, list[bytearray]]]:
        """Return what has come."""
        return [self.inbox.popleft() for _ in range(min(most, len(self.inbox)))]


class Link:
    """One direction between two ends."""

    def __init__(self, world: World, source: End, target: End, bytes_s: float) -> None:
        self._world = world
        self._source = source
        self._target = target
        self._bytes_s = bytes_s
        self._random = world.stream(f"link {source.name} {target.name}")
        self._waiting: deque[list[bytes | bytearray | memoryview]] = deque()
        self._frames = 0
        self._arrives_s = 0.0
        self._taking = False
        self.stalled_until_s = 0.0
        self.made_s = world.now
        """When its connection is made: later, where the hosts do not reach each other."""
        self.cut = False
        self.travelling = 0

    @property
    def full(self) -> bool:
        """Whether it takes no more now."""
        return self.waiting >= (RELAYED if self._source.relayed else WAITING)

    def send(self, frames: Frames) -> bool:
        """Take a packet; False where too many wait."""
        if self.cut:
            return True  # dropped
        if self.full:
            return False
        self._waiting.append(list(frames))
        self._take_next()
        return True

    def _take_next(self) -> None:
        if self._waiting and not self._taking:
            self._taking = True
            late_s = max(0.0, self.stalled_until_s - self._world.now)
            self._world.after(late_s + self._random.random() * TAKEN_S, self._take)

    def _take(self) -> None:
        self._taking = False
        if self.cut or not self._waiting:
            return
        world = self._world
        if world.now < self.stalled_until_s:
            self._take_next()
            return
        packet = [bytearray(frame) for frame in self._waiting.popleft()]
        self._frames += 1
        sent_s = sum(map(len, packet)) / self._bytes_s
        arrives_s = world.now + sent_s + 0.0001
        late, by = self._random.random() < world.late_p, self._random.expovariate(1.0)
        if late and world.deviates(
            f"{self._source.name} > {self._target.name} {self._frames} late"
        ):
            arrives_s += by * world.late_s
        self._arrives_s = max(self._arrives_s, arrives_s)
        self.travelling += 1
        world.at(self._arrives_s, self._arrive, packet)
        self._source.wake_sender()
        self._take_next()

    def _arrive(self, packet: list[bytearray]) -> None:
        self.travelling -= 1
        if self.cut or not self._target.open or not self._target.process.alive:
            return
        self._target.inbox.append((self._source.name, packet))
        self._target.wake()

    @property
    def waiting(self) -> int:
        """Packets that have not left the sender."""
        return len(self._waiting)

    @property
    def carries(self) -> bool:
        """Whether something is on its way."""
        return bool(self._waiting or self.travelling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Processes that do not reach each other for a while, those that start meanwhile too."""

    here: Callable[[Process], bool]
    there: Callable[[Process], bool]
    until_s: float

    def separates(self, one: Process, other: Process) -> bool:
        """Return whether two processes are on different sides."""
        return (self.here(one) and self.there(other)) or (self.there(one) and self.here(other))


class Fabric:
    """The links of a run.

    Args:
        world: it is in.
        bytes_s: the rate of each link.
    """

    def __init__(self, world: World, bytes_s: float = 1e8) -> None:
        self.world = world
        self._bytes_s = bytes_s
        self._links: dict[tuple[str, str], Link] = {}
        self._ends: dict[str, End] = {}
        self._parts: list[Part] = []

    def end(self, process: Process, name: str, *, relayed: bool = False) -> End:
        """Return a new end of a process; `relayed`: see `End`."""
        end = self._ends[name] = End(process, name, relayed=relayed)
        process.on_death.append(lambda silent: self.close(end, SILENCE_S if silent else RESET_S))
        return end

    def link(self, source: str, target: str) -> Link:
        """Return the link of two ends."""
        found = self._links.get((source, target))
        if found is None:
            ends = self._ends[source], self._ends[target]
            found = self._links[source, target] = Link(self.world, *ends, self._bytes_s)
            for part in self._parts:
                if part.separates(ends[0].process, ends[1].process):
                    # who connects tries again until the others can be reached
                    found.made_s = max(found.made_s, part.until_s)
            found.stalled_until_s = found.made_s
        return found

    def connect(self, source: str, target: str) -> None:
        """Make the links of two ends, both ways."""
        self.link(source, target)
        self.link(target, source)

    def connected_to(self, name: str) -> int:
        """Return how many connections of others an end has."""
        return sum(
            target == name and not link.cut and link.made_s <= self.world.now
            for (_, target), link in self._links.items()
        )

    def stall(self, process: Process, seconds: float) -> None:
        """Let the links of a process carry nothing for a while; all of it arrives later."""
        for (source, target), link in self._links.items():
            if process in (self._ends[source].process, self._ends[target].process):
                link.stalled_until_s = max(link.stalled_until_s, self.world.now + seconds)

    def part(
        self, here: Callable[[Process], bool], there: Callable[[Process], bool], seconds: float
    ) -> None:
        """Let processes and others not reach each other for a while. Their links carry nothing;
        after `SILENCE_S` their connections are lost for good. A new connection is made afterwards.
        """
        part = Part(here=here, there=there, until_s=self.world.now + seconds)
        self._parts.append(part)
        for (source, target), link in list(self._links.items()):
            if not part.separates(self._ends[source].process, self._ends[target].process):
                continue
            if seconds > SILENCE_S and link.made_s <= self.world.now:
                self.lose(source, target, SILENCE_S)
            else:
                link.stalled_until_s = max(link.stalled_until_s, part.until_s)

    def lose(self, source: str, target: str, noticed_s: float) -> None:
        """Lose the connection of two ends for good."""
        for at, far in ((source, target), (target, source)):
            link = self._links.get((at, far))
            if link is not None and not link.cut:
                link.cut = True
                self.world.after(noticed_s, self._notice, at, far)

    def separate(self, process: Process, other: Process, noticed_s: float) -> None:
        """Lose the connections of two processes for good."""
        for source, target in list(self._links):
            if {self._ends[source].process, self._ends[target].process} == {process, other}:
                self.lose(source, target, noticed_s)

    def _notice(self, at: str, far: str) -> None:
        end = self._ends[at]
        if end.open and end.process.alive:
            end.lost.append(far)
            end.wake()

    def close(self, end: End, noticed_s: float = RESET_S) -> None:
        """Close an end: what it was given arrives, unless something unread is on its way to it."""
        if not end.open:
            return
        end.open = False
        for (source, target), link in list(self._links.items()):
            if source != end.name:
                continue
            back = self._links.get((target, source))
            unread = bool(end.inbox) or (back is not None and back.carries)
            if (unread and not end.relayed) or noticed_s == SILENCE_S or not link.carries:
                self.lose(source, target, noticed_s)
            else:
                self._lose_later(source, target, link)

    def _lose_later(self, source: str, target: str, link: Link) -> None:
        if link.carries:
            late_s = max(0.01, link.stalled_until_s - self.world.now)
            self.world.after(late_s, self._lose_later, source, target, link)
        else:
            self.lose(source, target, RESET_S)


class SimulatedServer:
    """See `ServerTransport`."""

    refused = 0

    def __init__(self, fabric: Fabric, end: End) -> None:
        self._fabric = fabric
        self.end = end
        self.address = ADDRESS + end.name

    @property
    def connections(self) -> int:
        """See `ServerTransport`."""
        return self._fabric.connected_to(self.end.name)

    def admit_no_more(self) -> None:
        """See `ServerTransport`."""

    def known(self, peer: bytes) -> None:
        """See `ServerTransport`."""

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        """See `ServerTransport`; it waits for nothing."""
        return [(name.encode(), frames) for name, frames in self.end.take(256)]

    def blocks(self, peer: bytes) -> bool:
        """See `ServerTransport`."""
        return self._fabric.link(self.end.name, peer.decode()).full

    def send(self, peer: bytes, frames: Frames) -> bool:
        """See `ServerTransport`."""
        return self._fabric.link(self.end.name, peer.decode()).send(frames)

    def wake(self) -> None:
        """See `ServerTransport`."""
        self.end.wake()

    def close(self, *, drops: bool = False) -> None:
        """See `ServerTransport`."""
        self._fabric.close(self.end)


class SimulatedClient:
    """See `ClientTransport`; its peers have names."""

    def __init__(self, fabric: Fabric, end: End, peers: Sequence[str]) -> None:
        self._fabric = fabric
        self.end = end
        self._peers = list(peers)
        self._done: set[int] = set()
        for peer in peers:
            fabric.connect(end.name, peer)

    @property
    def lost(self) -> set[int]:
        """The peers whose connections were lost."""
        return {self._peers.index(name) for name in self.end.lost} - self._done

    def done_with(self, shard: int) -> None:
        """See `ClientTransport`."""
        self._done.add(shard)

    def describe_loss(self, shard: int) -> str:
        """See `TrackedTransport`."""
        return f"the connection to {self._peers[shard]}"

    def unsent(self, shard: int) -> int:
        """See `TrackedTransport`."""
        return self._fabric.link(self.end.name, self._peers[shard]).waiting

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        """See `ClientTransport`; it waits for nothing."""
        batch = [(self._peers.index(name), frames) for name, frames in self.end.take(256)]
        if not batch and (lost := self.lost):
            raise PeerLost(f"{self.end.name} lost {self._peers[min(lost)]}")
        return batch

    def blocks(self, shard: int) -> bool:
        """See `ClientTransport`."""
        return self._fabric.link(self.end.name, self._peers[shard]).full

    def send(self, shard: int, frames: Frames) -> bool:
        """See `ClientTransport`."""
        return self._fabric.link(self.end.name, self._peers[shard]).send(frames)

    def wake(self) -> None:
        """See `ClientTransport`."""
        self.end.wake()

    def close(self, *, drops: bool = False) -> None:
        """See `ClientTransport`."""
        self._fabric.close(self.end)


class SimulatedWire:
    """See `Wire`: the ends of one worker."""

    near = False

    def __init__(self, fabric: Fabric, process: Process, name: str = "") -> None:
        self._fabric = fabric
        self.listening = fabric.end(process, f"{name or process.name} in")
        self.sending = fabric.end(process, f"{name or process.name} out")
        self.now = fabric.world.clock

    def listen(self, host: str, keys: Keyring | None) -> SimulatedServer:
        """See `Wire`."""
        return SimulatedServer(self._fabric, self.listening)

    def connect(self, addresses: Sequence[str], keys: Keyring | None) -> SimulatedClient:
        """See `Wire`."""
        names = [address.removeprefix(ADDRESS) for address in addresses]
        return SimulatedClient(self._fabric, self.sending, names)

    def serve(
        self, steps: Iterator[float], failed: Callable[[Exception], None], ended: Callable[[], None]
    ) -> None:
        """Run the loop that moves what the ends have; see `Process.loop`."""
        loop = self.listening.process.loop(steps, failed, ended)
        self.listening.loop = self.sending.loop = loop
