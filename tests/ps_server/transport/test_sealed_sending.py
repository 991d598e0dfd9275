"""Memory of sealed packets is used again, and only once it was sent."""

from __future__ import annotations

import pytest

from ps_server.transport import sealed_sending
from ps_server.transport.sealed_sending import SentMemory


class Tracker:
    """Stands for ZeroMQ's."""

    def __init__(self) -> None:
        self.done = False


def block(view: memoryview) -> int:
    return id(view.obj)


def test_sent_memory_is_used_again() -> None:
    memory, tracker = SentMemory(), Tracker()
    first = memory.take(100_000)
    assert first.nbytes == 100_000
    memory.give_back(first, tracker)
    second = memory.take(100_000)
    assert block(second) != block(first)
    memory.give_back(second, None)
    tracker.done = True
    assert [block(memory.take(size)) for size in (120_000, 70_000)] == [block(first), block(second)]
    assert block(memory.take(100_000)) not in {block(first), block(second)}


def test_other_sizes_have_other_memory() -> None:
    memory = SentMemory()
    small = memory.take(10)
    memory.give_back(small, None)
    assert block(memory.take(1_000_000)) != block(small)
    assert block(memory.take(20)) == block(small)


def test_little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_sending, "MOST_KEPT_BYTES", 3 * 2**20)
    memory = SentMemory()
    taken = [memory.take(2**20) for _ in range(4)]
    for view in taken:
        memory.give_back(view, None)
    assert block(memory.take(2**20)) == block(taken[3])
    assert block(memory.take(2**20)) not in map(block, taken)
