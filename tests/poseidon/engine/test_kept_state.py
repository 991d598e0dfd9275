"""A state on its way into memory: pieces of all workers, in one order, to those who keep it."""

from __future__ import annotations

from collections.abc import Container

import pytest

from poseidon.engine.kept_state import LEAST_BYTES, KeptState, StateCopy
from poseidon.exchange.broadcast import PIECE_BYTES
from poseidon.exchange.job_control import JobControl
from ps_server import Collection, Signal, SignalKind
from ps_server.collection import Coming


class Meeting:
    """Collections of some workers: by number, what each has contributed."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.sent: list[dict[int, bytes]] = []

    def control(self, rank: int) -> JobControl:
        return _Control(self, rank)


class _Control(JobControl):
    requests: tuple[Signal, ...] = ()

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(root=rank == 0)
        self._meeting, self._rank, self._next = meeting, rank, 0

    def _gather(self, payload: bytes, to: Container[int] | None) -> Collection:
        meeting, number, self._next = self._meeting, self._next, self._next + 1
        if number == len(meeting.sent):
            meeting.sent.append({})
        meeting.sent[number][self._rank] = payload

        def poll() -> tuple[bytes, ...] | None:
            found = meeting.sent[number]
            if len(found) < meeting.workers:
                return None
            keeps = to is None or self._rank in to
            return tuple(found[rank] for rank in range(meeting.workers)) if keeps else ()

        def result() -> tuple[bytes, ...]:
            payloads = poll()
            assert payloads is not None
            return payloads

        return Collection(poll, result)

    def _request(self, kind: SignalKind) -> None:
        raise NotImplementedError


def coming(sent: list[bytes], iterations: int) -> tuple[Meeting, list[StateCopy]]:
    """Return the copies of workers of which all but the last keep the state."""
    meeting = Meeting(len(sent))
    copies = []
    for rank, own in enumerate(sent):
        keeps = rank < len(sent) - 1
        copies.append(
            StateCopy(
                own,
                {"values": Coming.here(7)} if keeps else {},
                meeting.control(rank),
                count=len(sent),
                rank=rank,
                keeps=keeps,
                note=b"note %d" % rank,
            )
        )
    for copy in copies:
        assert copy.notes() == [b"note %d" % rank for rank in range(len(sent))]
        copy.spread(iterations)
    return meeting, copies


def payload(size: int, begin: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 2))[begin:][:size]


def test_those_who_keep_it_get_what_all_send_and_others_keep_their_own() -> None:
    sent = [payload(LEAST_BYTES + 10, 0), payload(3, 1), b"", payload(7, 2)]
    meeting, copies = coming(sent, iterations=5)
    copies[0].send()
    assert copies[0].poll() is None
    for copy in copies[1:]:
        copy.send()
    whole = dict(enumerate(sent))
    for copy in copies[:3]:
        assert copy.poll() == KeptState(count=4, shared={"values": 7}, sent=whole)
    assert copies[3].poll() == KeptState(count=4, shared={}, sent={3: sent[3]})
    for copy in copies:
        copy.send()
    assert len(meeting.sent) == 2  # all is sent


def test_small_states_come_at_once() -> None:
    meeting, copies = coming([b"a", b"b"], iterations=5)
    for copy in copies:
        copy.send()
        assert copy.poll() is not None
    assert len(meeting.sent) == 1


def test_a_value_on_its_way_is_awaited() -> None:
    came: list[str] = []
    late = Coming(lambda: came or None, lambda: "late")
    meeting = Meeting(1)
    copy = StateCopy(
        b"", {"values": late}, meeting.control(0), count=1, rank=0, keeps=True, note=b""
    )
    copy.spread(1)
    assert copy.poll() is None
    came.append("here")
    found = copy.poll()
    assert found is not None
    assert found.shared == {"values": "late"}


@pytest.mark.parametrize(
    ("size", "iterations", "pieces"),
    [
        (5 * LEAST_BYTES, 1000, 4),
        (41 * LEAST_BYTES, 10, 10),
        (41 * LEAST_BYTES, 3, 3),
        (4 * PIECE_BYTES + LEAST_BYTES, 0, 4),
    ],
)
def test_pieces_are_spread_over_the_interval(size: int, iterations: int, pieces: int) -> None:
    sent = [payload(size // (1 + rank), rank) for rank in range(2)]
    meeting, copies = coming(sent, iterations)
    for number in range(1, pieces + 1):
        assert copies[0].poll() is None
        for copy in copies:
            copy.send()
        assert len(meeting.sent) == 1 + number
    found = copies[0].poll()
    assert found is not None
    assert found.sent == dict(enumerate(sent))
