"""A state in memory, and how it gets there while training continues.

Laws:
* All workers send equally many pieces, after the same iterations, so their collections have one
  order. A piece is small compared with what an iteration sends, unless the next copy is due soon.
* Pieces go only to the workers that keep the state. Another worker keeps what it has sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from poseidon.engine.leaf import unpacked
from poseidon.exchange.broadcast import PIECE_BYTES
from poseidon.exchange.job_control import JobControl
from ps_server import Collection
from ps_server.collection import Coming

LEAST_BYTES = 64 * 1024
"""The smallest piece, but for the last one. The first one of a copy is as large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """The state of all workers, or of one.

    Attributes:
        count: of the job's virtual workers.
        shared: by leaf; empty on a worker that keeps its own part alone.
        sent: what each worker has sent, by rank.
    """

    count: int
    shared: Mapping[str, Any]
    sent: Mapping[int, bytes | bytearray]

    @property
    def is_whole(self) -> bool:
        return bool(self.shared)

    def whole(self) -> dict[str, Any]:
        """Return the state as a value of its tree. A virtual worker without a state here gets a
        worker's of the same plane: no process reads it.
        """
        found = [self._of(rank) for rank in sorted(self.sent)]
        shared = dict(self.shared)
        for name, value in found[0][0].items():
            shared[name] = {**shared[name], **value} if name in shared else value
        own = {number: one for _, each in found for number, one in each.items()}
        here = sorted(own)
        each = [own[here[number * len(here) // self.count]] for number in range(self.count)]
        return {"workers": self.count, **shared, "own": each}

    def part(self, rank: int) -> dict[str, Any]:
        """Return as much of it as one worker has sent."""
        own = self._of(rank)[1] if rank in self.sent else {}
        return {"workers": self.count, "own": [own.get(n, {}) for n in range(self.count)]}

    def _of(self, rank: int) -> Any:
        return unpacked(self.sent[rank], f"the state of worker {rank}")


class StateCopy:
    """A state on its way into memory.

    Args:
        own: what this worker sends.
        shared: where the state is kept, what this worker has or gets otherwise, by leaf.
        count: of the job's virtual workers.
        note: for all workers.
    """

    def __init__(
        self,
        own: bytes,
        shared: Mapping[str, Coming[Any]],
        control: JobControl,
        *,
        count: int,
        rank: int,
        keeps: bool,
        note: bytes,
    ) -> None:
        self._own, self._shared, self._control = own, shared, control
        self._count, self._rank, self._keeps = count, rank, keeps
        self._first = control.gather(msgpack.packb([keeps, len(own), note, own[:LEAST_BYTES]]))
        self._piece = PIECE_BYTES
        self._starts: deque[int] | None = None
        self._to: frozenset[int] = frozenset()
        self._under_way: deque[Collection] = deque()
        self._received: dict[int, bytearray] = {}

    def notes(self) -> list[bytes]:
        """Return the notes of all workers, by rank. Waits for them."""
        return [note for *_, note, _ in self._heads()]

    def _heads(self) -> list[Any]:
        return [msgpack.unpackb(head) for head in self._first.result()]

    def spread(self, iterations: int) -> None:
        """Spread the pieces over so many iterations; with the same number on all workers."""
        heads = self._heads()
        rest = max(size for _, size, *_ in heads) - LEAST_BYTES
        self._piece = min(PIECE_BYTES, max(LEAST_BYTES, -(-rest // max(1, iterations))))
        self._starts = deque(range(LEAST_BYTES, LEAST_BYTES + rest, self._piece))
        self._to = frozenset(holder for holder, (keeps, *_) in enumerate(heads) if keeps)
        if self._keeps:
            self._received = {rank: bytearray(begin) for rank, (*_, begin) in enumerate(heads)}

    def send(self) -> None:
        """Send the next piece, if any is left. All workers call it after the same iteration."""
        assert self._starts is not None
        if self._starts:
            start = self._starts.popleft()
            piece = self._own[start : start + self._piece]
            self._under_way.append(self._control.gather(piece, self._to))

    def poll(self) -> KeptState | None:
        """Return the state once all pieces are sent and all of it is here; None before."""
        while self._under_way:
            payloads = self._under_way[0].poll()
            if payloads is None:
                return None
            self._under_way.popleft()
            self._take(payloads)
        if self._starts or any(value.poll() is None for value in self._shared.values()):
            return None
        return self._whole()

    def result(self) -> KeptState:
        """Send all pieces that are left, and wait for the whole state."""
        while self._starts:
            self.send()
        while self._under_way:
            self._take(self._under_way.popleft().result())
        return self._whole()

    def _take(self, payloads: Sequence[bytes]) -> None:
        for rank, memory in self._received.items():
            memory += payloads[rank]

    def _whole(self) -> KeptState:
        return KeptState(
            count=self._count,
            shared={name: value.result() for name, value in self._shared.items()},
            sent=dict(self._received) if self._keeps else {self._rank: self._own},
        )
