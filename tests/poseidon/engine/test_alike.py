"""Rank 0's tensors arrive whole, whatever they are made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from poseidon.engine.alike import PIECE_BYTES, broadcast, make_alike

TENSORS = {
    "whole numbers": (torch.arange(5), torch.zeros(5, dtype=torch.int64)),
    "truths": (torch.tensor([True, False]), torch.tensor([False, False])),
    "16 bits": (torch.tensor([1.5], dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)),
    "one number": (torch.tensor(3.0), torch.tensor(0.0)),
    "none": (torch.empty(0), torch.empty(0)),
    "transposed": (torch.rand(3, 4).t(), torch.zeros(3, 4).t()),
    "several pieces": (torch.rand(PIECE_BYTES // 4 + 1), torch.zeros(PIECE_BYTES // 4 + 1)),
}


@pytest.mark.parametrize(("first", "other"), TENSORS.values(), ids=TENSORS)
def test_a_worker_has_what_rank_0_has(first: Tensor, other: Tensor) -> None:
    said: list[bytes] = []

    def of_rank_0(payload: bytes) -> tuple[bytes, ...]:
        said.append(payload)
        return (payload, b"")

    def of_rank_1(payload: bytes) -> tuple[bytes, ...]:
        assert payload == b""
        return (said.pop(0), payload)

    expected = first.clone()
    make_alike([first], of_rank_0, rank=0)
    assert all(len(piece) <= PIECE_BYTES for piece in said)
    make_alike([other], of_rank_1, rank=1)
    assert torch.equal(first, expected)
    assert torch.equal(other, expected)
    assert not said


@pytest.mark.parametrize(
    "payload", [None, b"", b"x" * (PIECE_BYTES + 1)], ids=["nothing", "empty", "two pieces"]
)
def test_bytes_of_rank_0_arrive_whole(payload: bytes | None) -> None:
    said: list[bytes] = []

    def of_rank_0(part: bytes) -> tuple[bytes, ...]:
        said.append(part)
        return (part, b"")

    assert broadcast(payload, of_rank_0, rank=0) == payload
    assert all(len(part) <= PIECE_BYTES for part in said)
    assert broadcast(b"of another", lambda part: (said.pop(0), part), rank=1) == payload
    assert not said
