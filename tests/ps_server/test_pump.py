"""The end of a client, with a transport and a clock of the test's own."""

from __future__ import annotations

from ps_server.errors import PeerLost
from ps_server.meters import ClientMeter
from ps_server.monitor import Monitor
from ps_server.protocol import messages as m
from ps_server.protocol.frames import decode, encode
from ps_server.protocol.settings import StoreSpec
from ps_server.protocol.worker_session import Session
from ps_server.pump import Pump
from ps_server.shared_memory import WorkerSharedMemory
from ps_server.trace import NO_TRACE
from ps_server.transport.base import Frames


class HandFed:
    """The end of a client that is connected to two shards."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.inbox: list[tuple[int, Frames]] = []
        self.lost: set[int] = set()
        self.full: set[int] = set()
        self.sent: list[tuple[int, m.Message]] = []

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        batch, self.inbox = self.inbox, []
        if not batch and self.lost:
            raise PeerLost(f"lost shard {min(self.lost)}")
        return batch

    def blocks(self, shard: int) -> bool:
        return shard in self.full

    def send(self, shard: int, frames: Frames) -> bool:
        self.sent += [(shard, message) for message, _ in decode(frames)]
        return True

    def done_with(self, shard: int) -> None:
        self.lost.discard(shard)

    def wake(self) -> None:
        pass

    def close(self, *, drops: bool = False) -> None:
        pass


def test_a_shard_that_ends_early_takes_nothing_from_one_whose_link_is_down() -> None:
    """All workers have left shard 0, so it ends, while shard 1 is cut off for five seconds."""
    transport, store = HandFed(), StoreSpec(workers=1, shards=2, tables=())
    session, monitor = Session(0, store), Monitor(60.0, closed="", hangs="")
    pump = Pump(
        session,
        transport,
        WorkerSharedMemory(()),
        monitor,
        ClientMeter(store),
        NO_TRACE,
        prioritized=True,
        holds_back=False,
        clock=lambda: transport.now_s,
    )
    pump.add(session.start(lambda table: []))
    steps = pump.steps()
    next(steps)
    transport.full = {1}
    pump.add(session.leave())
    monitor.close()
    next(steps)
    assert (0, m.Leave()) in transport.sent
    transport.inbox = [(0, encode(m.Leave()))]
    transport.lost = {0}
    while transport.now_s < 5:
        assert next(steps, None) is not None
        transport.now_s += 0.5
    transport.full = set()
    next(steps)
    assert (1, m.Leave()) in transport.sent
    transport.inbox = [(1, encode(m.Leave()))]
    assert next(steps, None) is None
