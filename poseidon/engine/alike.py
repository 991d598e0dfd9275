"""Tensors that no exchange keeps together are brought to rank 0's values once, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PIECE_BYTES = 4 * 2**20
"""What one meeting of all workers carries."""


def broadcast(
    payload: bytes | None, gather: Callable[[bytes], tuple[bytes, ...]], *, rank: int
) -> bytes | None:
    """What rank 0 has, on every worker; None where it has nothing. All workers call it together, in pieces.

    Args:
        payload: rank 0's; the others' is not looked at.
        gather: hands in a worker's bytes, and gives all workers' by rank.
        rank: this worker.
    """
    whole = payload or b""
    head = (b"none" if payload is None else len(whole).to_bytes(8, "little")) if rank == 0 else b""
    answer = gather(head)[0]
    if answer == b"none":
        return None
    size = int.from_bytes(answer, "little")
    pieces = []
    for start in range(0, size, PIECE_BYTES):
        pieces.append(gather(whole[start : start + PIECE_BYTES] if rank == 0 else b"")[0])
    return b"".join(pieces)


def make_alike(tensors: Sequence[Tensor], gather: Callable[[bytes], tuple[bytes, ...]], *, rank: int) -> None:
    """Bring tensors to rank 0's values, in place and in pieces. All workers call it together.

    Args:
        tensors: of any type and on any device, the same shapes on every worker.
        gather: hands in a worker's bytes, and gives all workers' by rank.
        rank: this worker.
    """
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8)
        for start in range(0, flat.numel(), PIECE_BYTES):
            piece = flat[start : start + PIECE_BYTES]
            mine = piece.numpy().tobytes() if rank == 0 else b""
            piece.copy_(torch.frombuffer(bytearray(gather(mine)[0]), dtype=torch.uint8))
        with torch.no_grad():
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
