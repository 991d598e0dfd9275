"""The memory of one worker's sums, and of others of its machine.

A flat copy of all tensors for each node of the tree whose sum the worker sends, and behind them the
means of its slices. Workers of one machine open each other's memory: it has no name, and is checked
as a shard checks what a worker offers (`ps_server/shared_memory.py`). Law: what has been opened
stays valid until its last view is gone, however its owner ended.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from poseidon.exchange.allreduce.sum_rounds import FLOAT_BYTES, Buckets
from poseidon.exchange.device import Device
from poseidon.exchange.peers import Peers
from ps_server.protocol.virtual_workers import VirtualWorkers
from ps_server.shared_memory import PAGE_BYTES, new_memory, new_nonce, open_memory
from ps_server.transport.base import Buffer


class Views(NamedTuple):
    """The memory of a worker.

    Attributes:
        copies: of all tensors, a row each.
        means: of its slice of each bucket.
    """

    copies: Tensor
    means: Sequence[Tensor]


class SumsMemory:
    """The memory of one worker.

    Args:
        peers: the connections, not connected yet.
        device: to and from which the memory is copied.

    Attributes:
        own: its views; `lend` replaces them.
        lent: the workers that have opened it.
        opened: the memory of other workers.
    """

    def __init__(
        self, peers: Peers, layout: Buckets, workers: VirtualWorkers, device: Device
    ) -> None:
        self._peers = peers
        self._layout = layout
        self._workers = workers
        self._is_host = device.is_host
        self._file: int | None = None
        self.own = self._views(device.host_memory(self._floats(peers.rank)).zero_(), peers.rank)
        self.lent: set[int] = set()
        self.opened: dict[int, Views] = {}
        peers.on("Memory", 2, self._open)
        peers.on("Opened", 0, lambda sender, *_: self.lent.add(sender))

    def lend(self) -> None:
        """Let the other workers of this machine open this memory, if the system has such memory.
        All workers call it once they are connected, before the first round.
        """
        near = self._peers.neighbours() if self._is_host and self._layout.elements else []
        size, nonce = self._lent_bytes(self._peers.rank), new_nonce()
        if not near or (made := new_memory(size, nonce)) is None:
            return
        self._file, memory = made
        with self._peers.monitor:
            self.own = self._views(_floats_in(memory), self._peers.rank)
            self._peers.send(near, "Memory", os.getpid(), made[0], payload=nonce)
        self._peers.links.wake()

    def close(self) -> None:
        """Let go of all memory, once nothing is added any more. Safe to call twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self.own = Views(torch.empty(0), ())
        self.opened.clear()

    def _nodes(self, worker: int) -> int:
        return max(1, len(self._workers.nodes(worker)))

    def _means(self, worker: int) -> list[int]:
        """Return the size of a worker's slice of each bucket."""
        return [slices[worker].stop - slices[worker].start for slices in self._layout.slices]

    def _floats(self, worker: int) -> int:
        return self._nodes(worker) * self._layout.elements + sum(self._means(worker))

    def _lent_bytes(self, worker: int) -> int:
        return PAGE_BYTES + FLOAT_BYTES * self._floats(worker)

    def _views(self, memory: Tensor, worker: int) -> Views:
        means = self._means(worker)
        copies, rest = memory.tensor_split([len(memory) - sum(means)])
        copies = copies.view(self._nodes(worker), self._layout.elements)
        return Views(copies, rest.split(means) if means else ())

    # Messages, under the monitor.

    def _open(self, sender: int, fields: Sequence[int], nonce: Buffer) -> None:
        process, file = fields
        size = self._lent_bytes(sender)
        memory = open_memory(process, file, size, nonce) if self._is_host else None
        if memory is not None:
            self.opened[sender] = self._views(_floats_in(memory), sender)
            self._peers.send([sender], "Opened", payload=b"")


def _floats_in(memory: mmap.mmap) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.float32, offset=PAGE_BYTES)
