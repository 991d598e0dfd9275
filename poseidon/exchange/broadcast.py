"""Broadcasts and gathers, made of collections: bytes, and tensors that no other way keeps equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgpack
import torch
from torch import Tensor

from poseidon.exchange.base import Array
from poseidon.exchange.cost import ELEMENT_BYTES
from poseidon.exchange.job_control import JobControl

PIECE_BYTES = 4 * 2**20
"""The largest payload of one collection, in bytes."""

Gather = Callable[[bytes], Sequence[bytes]]
"""Contributes this worker's payload to a collection; returns the payloads of all workers by
rank.
"""


def broadcast_bytes(
    payload: bytes | None, gather: Gather, *, rank: int, root: int = 0
) -> bytes | None:
    """Return the root's payload on every worker; None where it has none.

    All workers call it together. They may have several roots; each root is its own.

    Args:
        payload: the root's payload, sent in pieces; ignored on other workers.
        root: the rank whose payload counts.
    """
    whole, sends = payload or b"", rank == root
    heads = gather((payload is not None).to_bytes() + len(whole).to_bytes(8) if sends else b"")
    pieces = []
    for start in range(0, max(int.from_bytes(head[1:]) for head in heads), PIECE_BYTES):
        pieces.append(gather(whole[start : start + PIECE_BYTES] if sends else b"")[root])
    return b"".join(pieces) if heads[root][0] else None


def gather_bytes(
    payload: bytes, gather: Gather, *, keeps: bool, ranks: Sequence[int] = ()
) -> list[bytes]:
    """Return the payloads of all workers by rank, where they are kept; else an empty list.

    All workers call it together.

    Payloads travel in pieces to all workers.

    Args:
        payload: of this worker, of any size.
        keeps: whether this worker keeps them.
        ranks: the workers whose payloads it keeps; empty: all.
    """
    sizes = [
        int.from_bytes(answer, "little") for answer in gather(len(payload).to_bytes(8, "little"))
    ]
    kept = (ranks or range(len(sizes))) if keeps else ()
    parts: list[list[bytes]] = [[] for _ in kept]
    for start in range(0, max(sizes), PIECE_BYTES):
        pieces = gather(payload[start : start + PIECE_BYTES])
        for own, rank in zip(parts, kept, strict=True):
            own.append(pieces[rank])
    return [b"".join(own) for own in parts]


def broadcast_parameters(tensors: Sequence[Tensor], gather: Gather, *, rank: int) -> None:
    """Set tensors to rank 0's values, in place and in pieces. All workers call it together.

    Args:
        tensors: of any type and on any device, the same shapes on every worker.
    """
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8)
        for start in range(0, flat.numel(), PIECE_BYTES):
            piece = flat[start : start + PIECE_BYTES]
            # a copy: memory that numpy has seen cannot be resized, as observers of quantization do
            mine = piece.clone().numpy().tobytes() if rank == 0 else b""
            piece.copy_(torch.frombuffer(bytearray(gather(mine)[0]), dtype=torch.uint8))
        with torch.no_grad():
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def bring_histories(histories: Sequence[Tensor], control: JobControl, *, given: bool) -> None:
    """Set histories that each worker keeps to rank 0's. All workers call it together.

    Nothing is sent where all workers were given theirs (a snapshot on disk, which all have read), or
    none was.

    Args:
        histories: of this worker, the same shapes on every worker.
        given: whether this worker continues from histories; otherwise they are zero.
    """
    found = control.all_gather(b"given" if given else b"")
    if any(one != found[0] for one in found):
        broadcast_parameters(histories, control.all_gather, rank=0 if control.root else 1)


def bring_parts(
    parts: Mapping[str, Tensor], given: Mapping[str, Array], control: JobControl, *, rank: int
) -> None:
    """Bring each worker from rank 0 what it lacks of the states of its virtual workers.

    All workers call it together. Each part goes to one worker only, and only if it was given to
    rank 0 and not to that worker.

    Args:
        parts: of the virtual workers of this worker, by name: float32, to be written to.
        given: what this worker begins with, by name; its own parts have this already.
    """
    lacking = sorted(parts.keys() - given.keys())
    sizes = {name: array.size for name, array in given.items()} if rank == 0 else {}
    heads = [msgpack.unpackb(head) for head in control.all_gather(msgpack.packb([lacking, sizes]))]
    sizes = heads[0][1]
    for receiver, (names, _) in enumerate(heads[1:], start=1):
        sent = [name for name in names if name in sizes]
        content = b"".join(given[name].tobytes() for name in sent) if rank == 0 else b""
        pieces = []
        for start in range(0, sum(sizes[name] for name in sent) * ELEMENT_BYTES, PIECE_BYTES):
            piece = control.gather(content[start : start + PIECE_BYTES], (receiver,)).result()
            pieces.append(piece[0] if rank == receiver else b"")
        if sent and rank == receiver:
            flat = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.float32)
            for name, part in zip(sent, flat.split([sizes[name] for name in sent]), strict=True):
                parts[name].view(-1).copy_(part)
