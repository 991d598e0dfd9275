"""Broadcasts: rank 0's bytes and tensors of every type arrive whole."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from poseidon.exchange.broadcast import (
    PIECE_BYTES,
    broadcast_bytes,
    broadcast_parameters,
    gather_bytes,
)

TENSORS = {
    "integers": (torch.arange(5), torch.zeros(5, dtype=torch.int64)),
    "booleans": (torch.tensor([True, False]), torch.tensor([False, False])),
    "16 bits": (torch.tensor([1.5], dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)),
    "one number": (torch.tensor(3.0), torch.tensor(0.0)),
    "none": (torch.empty(0), torch.empty(0)),
    "transposed": (torch.rand(3, 4).t(), torch.zeros(3, 4).t()),
    "several pieces": (torch.rand(PIECE_BYTES // 4 + 1), torch.zeros(PIECE_BYTES // 4 + 1)),
}


@pytest.mark.parametrize(("first", "other"), TENSORS.values(), ids=TENSORS)
def test_a_worker_receives_the_tensors_of_rank_0(first: Tensor, other: Tensor) -> None:
    sent: list[bytes] = []

    def of_rank_0(payload: bytes) -> tuple[bytes, ...]:
        sent.append(payload)
        return (payload, b"")

    def of_rank_1(payload: bytes) -> tuple[bytes, ...]:
        assert payload == b""
        return (sent.pop(0), payload)

    expected = first.clone()
    broadcast_parameters([first], of_rank_0, rank=0)
    assert all(len(piece) <= PIECE_BYTES for piece in sent)
    broadcast_parameters([other], of_rank_1, rank=1)
    assert torch.equal(first, expected)
    assert torch.equal(other, expected)
    assert not sent
    assert first.untyped_storage().resizable()


@pytest.mark.parametrize(
    "payload", [None, b"", b"x" * (PIECE_BYTES + 1)], ids=["nothing", "empty", "two pieces"]
)
def test_bytes_of_rank_0_arrive_whole(payload: bytes | None) -> None:
    sent: list[bytes] = []

    def of_rank_0(part: bytes) -> tuple[bytes, ...]:
        sent.append(part)
        return (part, b"")

    assert broadcast_bytes(payload, of_rank_0, rank=0) == payload
    assert all(len(part) <= PIECE_BYTES for part in sent)
    assert broadcast_bytes(b"of another", lambda part: (sent.pop(0), part), rank=1) == payload
    assert not sent


def test_bytes_of_all_workers_arrive_whole_at_rank_0_alone() -> None:
    payloads = [b"x" * (2 * PIECE_BYTES + 1), b"", b"yz"]
    barrier, parts = threading.Barrier(3), [b""] * 3

    def gathers(rank: int) -> list[bytes]:
        def gather(payload: bytes) -> tuple[bytes, ...]:
            assert len(payload) <= PIECE_BYTES
            parts[rank] = payload
            barrier.wait()
            everyone = tuple(parts)
            barrier.wait()
            return everyone

        return gather_bytes(payloads[rank], gather, keeps=rank == 0)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(gathers, range(3))) == [payloads, [], []]
