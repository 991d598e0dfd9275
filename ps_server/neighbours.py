"""A worker and a shard of one machine: large arrays pass from one to the other in memory, not through a socket.

The worker makes the memory and offers it (`Share`) to each shard at an address of its own machine; the shard answers whether it has
it (`Shared`). From then on each sends its large arrays on its lane (`lanes.py`).

Laws:

* All messages still travel through the socket, so their order, and who may say what, are the same with and without. An array
  that finds no place goes through the socket too, and so do all where the memory could not be shared.
* The memory has no name, and is gone with the two processes, however they went. It is sealed: no peer can make it shorter
  under the other's eyes.
* A shard opens nothing but a sealed memory of its own user that begins with the number that the worker has named.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import mmap
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from ps_server.errors import RemoteProtocolError
from ps_server.lanes import LEAST_BYTES, Lanes, Layout, whole_pages
from ps_server.protocol.messages import Share, Shared
from ps_server.protocol.placement import Chunk
from ps_server.transport.base import Frames

NONCE_BYTES = 16
SPARE_PLACES = 8
"""In a lane, beside two for each array: one that is in use, and the one that takes its place."""
_WORKER, _SHARD = 0, 1
_NAME = "poseidon"

Peer = TypeVar("Peer", int, bytes)


class Neighbours(Generic[Peer]):
    """Whom this end shares memory with. Only the thread that owns the sockets uses it."""

    def __init__(self) -> None:
        self._lending: dict[Peer, Lanes] = {}
        self._borrowing: dict[Peer, Lanes] = {}

    def send(self, peer: Peer, frames: Frames, send: Callable[[Peer, Frames], bool]) -> bool:
        """Send a packet by `send`, a neighbour's without its large arrays; returns whether it was taken."""
        lanes = self._lending.get(peer)
        if lanes is None:
            return send(peer, frames)
        rest, places = lanes.lend(frames)
        taken = send(peer, rest)
        if not taken:
            lanes.take_back(places)
        return taken

    def shares(self, peer: Peer) -> bool:
        """Whether a peer is on this machine, and has agreed to share memory."""
        return peer in self._lending

    def complete(self, peer: Peer, frames: Frames) -> Frames:
        """What a packet that has come was before it was sent.

        Raises:
            RemoteProtocolError: it speaks of what there is not.
        """
        lanes = self._borrowing.get(peer)
        return frames if lanes is None else lanes.borrow(frames)


class WorkerNeighbours(Neighbours[int]):
    """A worker's end: the shards, by index.

    Args:
        addresses: of all shards, `tcp://host:port`; none at all, and nothing is shared.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        super().__init__()
        self._addresses = addresses
        self._files: dict[int, int] = {}

    def offers(self, chunks_on: Callable[[int], Sequence[Chunk]]) -> dict[int, Share]:
        """Memory for each shard of this machine that holds large chunks, where the system has such memory."""
        found: dict[int, Share] = {}
        for shard, address in enumerate(self._addresses):
            sizes = [4 * chunk.size for chunk in chunks_on(shard) if 4 * chunk.size >= LEAST_BYTES]
            if sizes and is_here(address):
                with contextlib.suppress(OSError, AttributeError):  # AttributeError: a system without memfd
                    found[shard] = self._offer(shard, 2 * len(sizes) + SPARE_PLACES, whole_pages(max(sizes)))
        return found

    def _offer(self, shard: int, places: int, place_bytes: int) -> Share:
        layout = Layout(NONCE_BYTES, places, place_bytes)
        file, memory = new_memory(layout.total_bytes)
        memory[:NONCE_BYTES] = secrets.token_bytes(NONCE_BYTES)
        self._files[shard] = file
        self._borrowing[shard] = Lanes(memory, layout, sends=_WORKER)
        return Share(os.getpid(), file, memory[:NONCE_BYTES], places, place_bytes)

    def answered(self, shard: int, answer: Shared) -> None:
        """A shard has taken the memory, or could not.

        Raises:
            RemoteProtocolError: it was offered none.
        """
        file = self._files.pop(shard, None)
        if file is None:
            raise RemoteProtocolError(f"shard {shard} answers what it was not asked")
        os.close(file)
        if answer.taken:
            self._lending[shard] = self._borrowing[shard]
        else:
            del self._borrowing[shard]

    def close(self) -> None:
        """Let go of what was not answered."""
        while self._files:
            os.close(self._files.popitem()[1])


class ShardNeighbours(Neighbours[bytes]):
    """A shard's end: the workers, by their names in the transport."""

    def accept(self, peer: bytes, share: Share) -> Shared:
        """Take the memory that a worker offers.

        Raises:
            RemoteProtocolError: it has offered some before.
        """
        if peer in self._borrowing:
            raise RemoteProtocolError("memory is offered once")
        layout = Layout(NONCE_BYTES, share.places, share.place_bytes)
        memory = open_memory(share.process, share.file, layout.total_bytes)
        if memory is None or not hmac.compare_digest(memory[:NONCE_BYTES], share.nonce):
            return Shared(taken=False)
        self._lending[peer] = self._borrowing[peer] = Lanes(memory, layout, sends=_SHARD)
        return Shared(taken=True)


def is_here(address: str) -> bool:
    """Whether an address, `tcp://host:port`, is one of this machine's own: whether this process could listen there."""
    parts = urlsplit(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(parts.hostname, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
    except (OSError, ValueError):
        return False
    return True


def new_memory(size: int) -> tuple[int, mmap.mmap]:
    """Memory without a name, all zero, of which a page is taken when it is first written to.

    Returns:
        Its file, to be closed, and itself.

    Raises:
        OSError: the system has not so much.
        AttributeError: the system has no such memory.
    """
    file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _seals())
        return file, mmap.mmap(file, size)
    except BaseException:
        os.close(file)
        raise


def open_memory(process: int, file: int, size: int) -> mmap.mmap | None:
    """What `new_memory` made in another process of this machine and user; None where there is nothing of that kind."""
    link = f"/proc/{process}/fd/{file}"
    try:
        if not os.readlink(link).startswith(f"/memfd:{_NAME}"):
            return None
        opened = os.open(link, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status, seals = os.fstat(opened), _seals()
        is_ours = status.st_uid == os.geteuid() and status.st_size == size
        if not is_ours or fcntl.fcntl(opened, fcntl.F_GET_SEALS) & seals != seals:
            return None
        return mmap.mmap(opened, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(opened)


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
