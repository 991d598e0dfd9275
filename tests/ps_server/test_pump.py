"""The end of a client, with a transport and a clock of the test's own."""

from __future__ import annotations

import numpy as np

from ps_server.errors import PeerLost
from ps_server.monitor import Monitor
from ps_server.protocol import messages as m
from ps_server.protocol.frames import decode, encode
from ps_server.protocol.placement import place
from ps_server.protocol.schedule import PACKET_IN_MEMORY_BYTES
from ps_server.protocol.settings import StoreSpec, TableSpec
from ps_server.protocol.worker_session import Session
from ps_server.pump import Pump
from ps_server.shared_memory import ShardSharedMemory, WorkerSharedMemory
from ps_server.trace import NO_TRACE
from ps_server.transport.base import Frames

PEER = b"worker 0"


class HandFed:
    """The end of a client that is connected to two shards."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.inbox: list[tuple[int, Frames]] = []
        self.lost: set[int] = set()
        self.full: set[int] = set()
        self.packets: list[Frames] = []
        self.sent: list[tuple[int, m.Message]] = []
        self.memory = ShardSharedMemory()

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        batch, self.inbox = self.inbox, []
        if not batch and self.lost:
            raise PeerLost(f"lost shard {min(self.lost)}")
        return batch

    def blocks(self, shard: int) -> bool:
        return shard in self.full

    def send(self, shard: int, frames: Frames) -> bool:
        self.packets.append(frames)
        opened = self.memory.receive(PEER, frames)
        self.sent += [(shard, message) for message, _ in decode(opened)]
        return True

    def done_with(self, shard: int) -> None:
        self.lost.discard(shard)

    def wake(self) -> None:
        pass

    def close(self, *, drops: bool = False) -> None:
        pass


def new_pump(transport: HandFed, session: Session, memory: WorkerSharedMemory) -> Pump:
    return Pump(
        session,
        transport,
        memory,
        Monitor(60.0, closed="", hangs=""),
        NO_TRACE,
        clock=lambda: transport.now_s,
    )


def test_pushes_to_a_shard_of_this_machine_leave_together() -> None:
    size = PACKET_IN_MEMORY_BYTES // 16  # of 4 bytes: a fourth of a packet
    tables = tuple(TableSpec(name=str(index), size=size) for index in range(6))
    transport = HandFed()
    session = Session(0, StoreSpec(workers=1, shards=1, tables=tables))
    memory = WorkerSharedMemory(["tcp://127.0.0.1:5555"])
    placement = place(session.store)
    [offer] = memory.offers(placement.of_shard).values()
    memory.answered(0, transport.memory.accept(PEER, offer))
    pump = new_pump(transport, session, memory)
    pump.add(session.start(lambda table: [np.zeros(size, np.float32)]))
    steps = pump.steps()
    next(steps)

    def push(table: int) -> bool:
        return pump.add(session.push(table, np.ones(size, np.float32), 0.1))

    transport.packets.clear()
    assert [push(table) for table in (0, 1, 2)] == [False] * 3
    pump._send_waiting()
    assert not transport.packets
    assert push(3)  # a packet is full
    pump._send_waiting()
    assert len(transport.packets) == 2  # each message has a header, too
    assert not push(4)
    pump.hurry()  # the worker waits for a value
    pump._send_waiting()
    assert len(transport.packets) == 3
    assert not push(5)
    next(steps)  # nothing came for `POLL_S`
    next(steps)
    assert len(transport.packets) == 4
    pushed = [message.table for _, message in transport.sent if isinstance(message, m.Push)]
    assert [*dict.fromkeys(pushed)] == [*range(6)]


def test_a_shard_that_ends_early_takes_nothing_from_one_whose_link_is_down() -> None:
    """All workers have left shard 0, so it ends, while shard 1 is cut off for five seconds."""
    transport, store = HandFed(), StoreSpec(workers=1, shards=2, tables=())
    session = Session(0, store)
    pump = new_pump(transport, session, WorkerSharedMemory(()))
    pump.add(session.start(lambda table: []))
    steps = pump.steps()
    next(steps)
    transport.full = {1}
    pump.add(session.leave())
    pump._monitor.close()
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
