"""What passes between workers of one host in memory: large payloads in memory of the host, and large
tensors of a GPU within the GPUs of the host.

    ["Shared", ...]                 the place of a payload in memory of the host
    ["Lent", ...]                   the place of a tensor in memory of the sender's GPU
    ["Taken", number] empty         what was lent in this block is copied
    ["Offer"] handle                of a pattern in memory of the sender's GPU
    ["Reads"] problem               the pattern could be read, if empty
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import msgpack
from torch import Tensor

from poseidon.errors import printable
from poseidon.torch.process_group.late_links import LateLinks
from poseidon.torch.process_group.lent_blocks import Lent, LentBlocks
from poseidon.torch.process_group.shared_blocks import LEAST_BYTES, Place, SharedBlocks
from ps_server import RemoteProtocolError
from ps_server.transport.base import Buffer

LOGGER = logging.getLogger(__name__)


class HostMemory:
    """The memory that one worker shares with others of its host.

    Args:
        neighbours: the ranks of the workers of this host.

    Attributes:
        neighbours: this worker, too.
    """

    def __init__(self, links: LateLinks, neighbours: Collection[int]) -> None:
        self.neighbours = frozenset(neighbours) | {links.network.rank}
        self._links = links
        self._rank = links.network.rank
        self._shared = SharedBlocks()
        self._lent = LentBlocks()

    def put(self, payload: Buffer, receivers: Sequence[int]) -> dict[int, bytes]:
        """Copy a large payload to memory for its receivers on this host. Return what their messages
        have in its place, by rank; other receivers get the payload itself.
        """
        near = self._near(receivers) if memoryview(payload).nbytes >= LEAST_BYTES else ()
        place = self._shared.put(payload, len(near)) if near else None
        if place is None:
            return {}
        return {rank: msgpack.packb([*place, number]) for number, rank in enumerate(near)}

    def lends_to(self, ranks: Collection[int]) -> bool:
        """Return whether large tensors of a GPU may pass between this worker and one of these
        others within the GPUs of this host. No other worker has to know.
        """
        return not self._lent.refused and bool(self._near(ranks))

    def lend(self, receivers: Sequence[int], head: Sequence[object], tensor: Tensor) -> list[int]:
        """Send a tensor of this worker's GPU to those that can read it there, and wait until it is
        there; return the others.

        Args:
            head: of its messages.
        """
        left = list(receivers)
        if tensor.nbytes < LEAST_BYTES or not self.lends_to(receivers):
            return left
        self.answer_offers(tensor)
        for rank in self._near(receivers):
            try:
                handle = self._lent.offer(rank, tensor)
            except RuntimeError as error:  # torch's own errors are such
                self._note_reader(rank, str(error).partition("\n")[0])
                return left
            if handle:
                self._links.post(["Offer"], ([rank], handle))
        readers = self._lent.readers_of(receivers)
        places = self._lent.put(tensor, readers) if readers else []
        for reader, place in zip(readers, places, strict=False):
            self._links.post(["Lent", *head], ([reader], msgpack.packb(place)))
            left.remove(reader)
        return left

    def answer_offers(self, like: Tensor) -> None:
        """Answer the workers that would lend memory of their GPUs.

        Args:
            like: a tensor of this worker's GPU.
        """
        for owner, problem in self._lent.answers(like):
            self._links.post(["Reads"], ([owner], problem.encode()))

    def take(self, sender: int, lent: Lent, like: Tensor) -> Tensor:
        """Return a copy of what a worker has lent, on the device of `like`."""
        found = self._lent.take(sender, lent, like)
        self._links.post(["Taken", lent.number], ([sender], b""))
        return found

    def payload(self, kind: str, sender: int, frame: Buffer) -> Buffer | Lent:
        """Return the payload of a message "Shared" or "Lent".

        Raises:
            RemoteProtocolError: the sender is of another host, or the place cannot be.
            TransportError: the memory cannot be opened.
        """
        match kind, msgpack.unpackb(frame) if sender in self.neighbours else None:
            case "Shared", [int(process), int(file), int(block), int(size), int(number)]:
                return self._shared.get(Place(process, file, block, size), number)
            case "Lent", [int(number), int(size), bytes(handle)]:
                return Lent(number, size, handle)
            case _:
                raise RemoteProtocolError(f"worker {sender} shares no memory with this one")

    def hear(self, sender: int, header: Sequence[object], frame: Buffer) -> None:
        """Take any other message.

        Raises:
            RemoteProtocolError: it is not valid.
        """
        match header:
            case ["Taken", int(number)]:
                self._lent.read(number, sender)
            case ["Offer"] if sender in self.neighbours:
                self._lent.offered(sender, bytes(frame))
            case ["Reads"] if sender in self.neighbours:
                self._note_reader(sender, bytes(frame).decode(errors="backslashreplace"))
            case _:
                raise RemoteProtocolError("a peer sent something that is not data")

    def is_done(self, left: set[int]) -> bool:
        """Return whether nobody needs the memory of this worker any more.

        Args:
            left: the workers that have left.
        """
        is_read = self._shared.all_open and self._lent.all_read(left)
        return is_read or left.issuperset(self.neighbours - {self._rank})

    def close(self) -> None:
        """Let go of all memory."""
        self._shared.close()
        self._lent.close()

    def _near(self, ranks: Collection[int]) -> list[int]:
        return [rank for rank in ranks if rank in self.neighbours and rank != self._rank]

    def _note_reader(self, sender: int, problem: str) -> None:
        if self._lent.answered(sender, problem) and self._rank == min(self.neighbours):
            LOGGER.warning(
                "the GPUs of this machine do not share memory (worker %d, GPU of worker %d: %s); "
                "torch.distributed passes their tensors through the host's memory",
                sender,
                self._rank,
                printable(problem),
            )
