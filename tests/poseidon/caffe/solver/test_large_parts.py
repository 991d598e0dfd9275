"""The large parts of virtual workers: pieces of all workers, in one order, to those who hold them."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import pytest
import torch

from poseidon.caffe.solver.large_parts import LEAST_BYTES, ComingParts, Head, OwnParts
from poseidon.exchange.base import Array
from poseidon.exchange.broadcast import PIECE_BYTES
from poseidon.exchange.job_control import JobControl
from ps_server import Collection, Signal, SignalKind


class Meeting:
    """Collections of some workers: by number, what each has contributed."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.sent: list[dict[int, bytes]] = []

    def control(self, rank: int) -> JobControl:
        return JobControl(_Delivery(self, rank), root=rank == 0)


class _Delivery:
    requests: tuple[Signal, ...] = ()

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank, self._next = meeting, rank, 0

    def gather(self, payload: bytes, to: Container[int] | None = None) -> Collection:
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

    def request(self, kind: SignalKind) -> None:
        raise NotImplementedError


def coming(
    live: list[dict[str, torch.Tensor]], iterations: int
) -> tuple[Meeting, list[ComingParts]]:
    """Return the parts of workers of which all but the last hold snapshots."""
    meeting = Meeting(len(live))
    own = [OwnParts(one) for one in live]
    heads = [Head.unpack(one.head(holds=rank < len(live) - 1)) for rank, one in enumerate(own)]
    return meeting, [
        ComingParts(one, heads, meeting.control(rank), rank=rank, iterations=iterations)
        for rank, one in enumerate(own)
    ]


def of(found: object) -> dict[str, list[float]]:
    assert isinstance(found, dict)
    return {name: array.tolist() for name, array in found.items()}


def test_holders_get_the_parts_of_all_and_others_keep_their_own() -> None:
    live = [
        {"w of 0": torch.tensor([[1.0, 2.0]]), "b of 0": torch.tensor([3.0])},
        {"w of 1": torch.tensor([[4.0, 5.0]])},
        {},
        {"w of 2": torch.tensor([6.0]), "w of 3": torch.tensor([7.0])},
    ]
    everything = {name: part.view(-1).tolist() for one in live for name, part in one.items()}
    meeting, parts = coming(live, iterations=5)
    for tensor in live[0].values():
        tensor.zero_()  # training goes on
    parts[0].send()
    assert parts[0].poll() is None
    for one in parts[1:]:
        one.send()
    assert [of(one.poll()) for one in parts[:3]] == [everything] * 3
    assert of(parts[3].poll()) == {"w of 2": [6.0], "w of 3": [7.0]}
    for one in parts:
        one.send()
    assert len(meeting.sent) == 1  # all is sent


def test_nothing_is_sent_where_there_is_nothing() -> None:
    meeting, parts = coming([{}, {}], iterations=5)
    for one in parts:
        one.send()
        assert one.poll() == {}
    assert meeting.sent == []


@pytest.mark.parametrize(
    ("elements", "iterations", "pieces"),
    [
        (LEAST_BYTES, 1000, 4),
        (10 * LEAST_BYTES, 10, 10),
        (10 * LEAST_BYTES, 3, 3),
        (PIECE_BYTES, 0, 4),
    ],
)
def test_pieces_are_spread_over_the_interval(elements: int, iterations: int, pieces: int) -> None:
    live = [{f"w of {rank}": torch.arange(elements // (1 + rank)).float()} for rank in range(2)]
    meeting, parts = coming(live, iterations)
    for number in range(1, pieces + 1):
        assert parts[0].poll() is None
        for one in parts:
            one.send()
        assert len(meeting.sent) == number
    found = parts[0].poll()
    assert found is not None
    for one, whole in zip(live, ("w of 0", "w of 1"), strict=True):
        expected: Array = one[whole].numpy()
        assert np.array_equal(found[whole], expected)
