"""The transport inside one process, with seeded faults: the test rig of everything above it.

A `MemoryNetwork` joins one server end per shard with one client end per worker. Each direction of
each pair is a link that keeps its order. Faults, all drawn from one seeded generator:

* delay: a frame waits while up to `delay` other deliveries happen anywhere on the network, so links
  overtake each other in an order that the seed decides;
* drop: a frame is lost (a real link loses nothing in the middle; this shows that loss is noticed);
* repeat: a frame arrives twice (a replay);
* cut: a link carries no more frames.

A link holds any number of frames, so `send` always takes them. Frames are joined to bytes on
sending, as a socket would, so a sender that reuses its buffer cannot be seen.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from dataclasses import dataclass

from ps_server.transport.base import MAX_BATCH, Frames


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of a network, and how often each happens.

    Args:
        seed: of all draws.
        delay: most deliveries that a frame waits for.
        drop: probability that a frame is lost.
        repeat: probability that a frame arrives twice.
    """

    seed: int = 0
    delay: int = 0
    drop: float = 0.0
    repeat: float = 0.0


class _Link:
    """One direction between two ends: (frames, deliveries still to wait for), oldest first."""

    __slots__ = ("cut", "queue")

    def __init__(self) -> None:
        self.queue: deque[list[object]] = deque()
        self.cut = False


class MemoryNetwork:
    """Joins `shards` servers with any number of clients.

    Args:
        shards: number of server ends.
        faults: which there are; None: none.
    """

    def __init__(self, shards: int, faults: Faults | None = None) -> None:
        self._faults = faults or Faults()
        self._random = random.Random(self._faults.seed)
        self._changed = threading.Condition()
        self._links: dict[tuple[str, str], _Link] = {}
        self._woken: set[str] = set()
        self.shards = shards

    def server(self, shard: int) -> MemoryServerTransport:
        """Return the server end of `shard`."""
        return MemoryServerTransport(self, shard)

    def client(self, name: str) -> MemoryClientTransport:
        """Return a client end, connected to every shard."""
        with self._changed:
            for shard in range(self.shards):
                self._links[name, f"shard {shard}"] = _Link()
                self._links[f"shard {shard}", name] = _Link()
        return MemoryClientTransport(self, name)

    def cut(self, name: str, shard: int) -> None:
        """Let nothing pass between a client and a shard from now on, either way."""
        with self._changed:
            for pair in ((name, f"shard {shard}"), (f"shard {shard}", name)):
                self._links[pair].cut = True
                self._links[pair].queue.clear()

    def send(self, source: str, target: str, frames: Frames) -> None:
        """Put frames on a link."""
        with self._changed:
            link = self._links.get((source, target))
            if link is None or link.cut or self._random.random() < self._faults.drop:
                return
            copies = 2 if self._random.random() < self._faults.repeat else 1
            for _ in range(copies):
                wait = self._random.randint(0, self._faults.delay)
                link.queue.append([[bytes(frame) for frame in frames], wait])
            self._changed.notify_all()

    def receive(self, target: str, timeout_s: float) -> list[tuple[str, Frames]]:
        """Take what may be delivered now to `target`; wait up to `timeout_s` for the first."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                batch = self._deliver(target)
                left = deadline - time.monotonic()
                if batch or target in self._woken or left <= 0:
                    self._woken.discard(target)
                    return batch
                self._changed.wait(left)

    def wake(self, target: str) -> None:
        """Make a waiting `receive` of `target` return."""
        with self._changed:
            self._woken.add(target)
            self._changed.notify_all()

    def _deliver(self, target: str) -> list[tuple[str, Frames]]:
        batch: list[tuple[str, Frames]] = []
        while len(batch) < MAX_BATCH:
            waiting = [
                (key, link) for key, link in self._links.items() if key[1] == target and link.queue
            ]
            if not waiting:
                break
            (source, _), link = waiting[self._random.randrange(len(waiting))]
            head = link.queue[0]
            if isinstance(head[1], int) and head[1] > 0:
                head[1] -= 1
                continue
            frames = link.queue.popleft()[0]
            assert isinstance(frames, list)
            batch.append((source, frames))
        return batch


class MemoryServerTransport:
    """See `ServerTransport`."""

    def __init__(self, network: MemoryNetwork, shard: int) -> None:
        self._network = network
        self._name = f"shard {shard}"

    @property
    def address(self) -> str:
        """A name, not a real address."""
        return f"memory://{self._name}"

    @property
    def refused(self) -> int:
        """Always 0: there is no authentication."""
        return 0

    @property
    def connections(self) -> int:
        """Always 1: clients stay connected."""
        return 1

    def admit_no_more(self) -> None:
        """Do nothing: all clients are made here."""

    def known(self, peer: bytes) -> None:
        """Do nothing: there are no strangers."""

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        return [
            (name.encode(), frames) for name, frames in self._network.receive(self._name, timeout_s)
        ]

    def blocks(self, peer: bytes) -> bool:
        return False

    def send(self, peer: bytes, frames: Frames) -> bool:
        self._network.send(self._name, peer.decode(), frames)
        return True

    def wake(self) -> None:
        self._network.wake(self._name)

    def close(self, *, drops: bool = False) -> None:
        pass


class MemoryClientTransport:
    """See `ClientTransport`."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self._network = network
        self._name = name

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        return [
            (int(source.removeprefix("shard ")), frames)
            for source, frames in self._network.receive(self._name, timeout_s)
        ]

    def blocks(self, shard: int) -> bool:
        return False

    def send(self, shard: int, frames: Frames) -> bool:
        self._network.send(self._name, f"shard {shard}", frames)
        return True

    def done_with(self, shard: int) -> None:
        pass

    def wake(self) -> None:
        self._network.wake(self._name)

    def close(self, *, drops: bool = False) -> None:
        pass
