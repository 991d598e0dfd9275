"""Collectives among the workers of a group, made of messages between any two of them.

Laws:
* A reduction adds the parts of the workers in the order of their ranks, one after another, and
  types of 16 bits in float32, rounded once. Its bits depend on the number of workers alone, and
  are equal on all of them.
* All workers of a group make the same calls in the same order, with tensors of the same size and
  type. A different call is an error on the workers that wait for it, which names both calls.

All tensors are flat and contiguous. Those on a GPU pass between the GPUs of a host where these
share memory (`lent_blocks.py`), and else through the host's memory; either way they are reduced on
the GPU. Calls with such a tensor wait on the host for what they send and receive.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.device import device_of
from poseidon.torch.process_group.lent_blocks import Lent
from poseidon.torch.process_group.mesh import (
    CollectiveCall,
    DifferentCalls,
    Mesh,
    Message,
    MessageId,
)
from poseidon.torch.process_group.worker_parts import ReduceRule, described, reduced

SMALL_BYTES = 32 * 1024
"""A tensor of at most this size is sent whole to all workers, which reduce it themselves: one step
in place of two.
"""
SEGMENT_BYTES = 4 * 2**20
"""A larger tensor is reduced in segments of this size for each worker, so that one segment is
reduced while the next ones travel.
"""


class Collectives:
    """The collectives of one group on one worker. One thread calls them.

    Args:
        group: the group's name, the same on all its workers.
        ranks: of its workers among all workers of the job, in the order of their ranks within the
            group.
        timeout_s: the longest time that a call waits; None: the mesh's.

    Attributes:
        place: the line of the script that makes the next call; for errors.
    """

    def __init__(
        self, mesh: Mesh, group: str, ranks: Sequence[int], timeout_s: float | None = None
    ) -> None:
        self.mesh = mesh
        self.place = ""
        self.timeout_s = timeout_s
        self._group = group
        self.ranks = tuple(ranks)
        self._number = 0
        self._sent: Counter[tuple[int, int]] = Counter()
        self._taken: Counter[tuple[int, int]] = Counter()
        self._expected: dict[int, list[_Expected]] = {}
        self.rank = self.ranks.index(mesh.rank)
        self.size = len(self.ranks)
        self.others = [(self.rank + i) % self.size for i in range(1, self.size)]

    def all_reduce(self, tensor: Tensor, reduction: ReduceRule) -> None:
        """Replace a tensor by the reduction of all workers' tensors."""
        call = self._begin("all_reduce", tensor, reduction.value)
        if tensor.nbytes <= SMALL_BYTES or self.size == 1:
            tensor.copy_(reduced(call.exchange(tensor), reduction))
            return
        step = SEGMENT_BYTES // tensor.element_size() * self.size
        segments = [segment.tensor_split(self.size) for segment in tensor.split(step)]
        for number, shares in enumerate(segments):
            for other in self.others:
                call.send([other], 2 * number, shares[other], lasting=True)
        for number, shares in enumerate(segments):
            own = shares[self.rank]
            whole = reduced(call.receive_all(own, 2 * number), reduction)
            own.copy_(whole)
            call.send(self.others, 2 * number + 1, whole, lasting=True)
        for number, shares in enumerate(segments):
            # the share has come back, so the part that was sent from this memory has arrived
            for other in self.others:
                shares[other].copy_(call.receive(other, 2 * number + 1, shares[other]))

    def all_reduce_rows(self, tensor: Tensor, reduction: ReduceRule) -> Tensor:
        """Return the sum or the mean of all workers' sparse tensors, which are of one shape.

        Workers may have different elements, and different numbers of them.
        """
        own = tensor.coalesce()
        count = torch.tensor([own._nnz()], dtype=torch.int64, device="cpu")
        counts = [int(other) for other in self.all_gather(count)]
        gathered = []
        for rows in (own.indices().T, own.values()):
            flat, of_one = rows.reshape(-1), math.prod(rows.shape[1:])
            results = [flat.new_empty(number * of_one) for number in counts]
            self.all_to_all([flat] * self.size, results)
            gathered.append([result.view(-1, *rows.shape[1:]) for result in results])
        parts = [
            torch.sparse_coo_tensor(
                indices.T, values, tensor.shape, check_invariants=False, is_coalesced=True
            )
            for indices, values in zip(*gathered, strict=True)
        ]
        result = sum(parts[1:], parts[0])
        return result / self.size if reduction is ReduceRule.MEAN else result

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Replace a tensor by one worker's."""
        call = self._begin("broadcast", tensor, f"from {root}")
        on_one_host = self.mesh.memory.neighbours.issuperset(self.ranks)
        if tensor.nbytes <= SMALL_BYTES or self.size <= 2 or on_one_host:
            if self.rank == root:
                call.send(self.others, 0, tensor)
            else:
                tensor.copy_(call.receive(root, 0, tensor))
            return
        # each worker gets one share of the root and sends it on, so no link carries all copies
        shares = tensor.tensor_split(self.size)
        if self.rank == root:
            for other in self.others:
                call.send([other], 0, shares[other])
        else:
            shares[self.rank].copy_(call.receive(root, 0, shares[self.rank]))
        call.send([other for other in self.others if other != root], 1, shares[self.rank])
        for other in self.others if self.rank != root else ():
            shares[other].copy_(call.receive(other, 1, shares[other]))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all workers by rank."""
        return self._begin("all_gather", tensor).exchange(tensor)

    def gather(self, tensor: Tensor, root: int) -> list[Tensor]:
        """Return the tensors of all workers by rank on one worker; an empty list elsewhere."""
        call = self._begin("gather", tensor, f"to {root}")
        if self.rank != root:
            call.send([root], 0, tensor)
            return []
        return call.receive_all(tensor)

    def scatter(self, tensor: Tensor, parts: Sequence[Tensor], root: int) -> None:
        """Replace a tensor by the part that one worker has for this one.

        Args:
            parts: on the root, one for each worker.
        """
        call = self._begin("scatter", tensor, f"from {root}")
        if self.rank != root:
            tensor.copy_(call.receive(root, 0, tensor))
            return
        for other in self.others:
            call.send([other], 0, parts[other])
        tensor.copy_(parts[root])

    def reduce(self, tensor: Tensor, reduction: ReduceRule, root: int) -> None:
        """Replace one worker's tensor by the reduction of all workers' tensors."""
        call = self._begin("reduce", tensor, f"{reduction.value} to {root}")
        if self.rank != root:
            call.send([root], 0, tensor)
            return
        tensor.copy_(reduced(call.receive_all(tensor), reduction))

    def reduce_scatter(self, parts: Sequence[Tensor], reduction: ReduceRule) -> Tensor:
        """Return the reduction of what all workers have for this one.

        Args:
            parts: one for each worker, of any sizes that all workers agree on.
        """
        call = self._begin("reduce_scatter", None, reduction.value)
        for other in self.others:
            call.send([other], 0, parts[other])
        return reduced(call.receive_all(parts[self.rank]), reduction)

    def all_to_all(self, parts: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Send each worker its part, and fill the results with what each has for this worker."""
        call = self._begin("all_to_all", None)
        for other in self.others:
            call.send([other], 0, parts[other])
        results[self.rank].copy_(parts[self.rank])
        for other in self.others:
            results[other].copy_(call.receive(other, 0, results[other]))

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return once all workers have called it.

        Args:
            timeout_s: the longest wait; None: the group's.
        """
        call = self._begin("barrier", None, timeout_s=timeout_s)
        call.exchange(torch.empty(0, dtype=torch.uint8, device="cpu"))

    def sending(self, tensor: Tensor, receiver: int, tag: int) -> Callable[[], None]:
        """Return a function that sends a tensor to one worker. Any thread may call it.

        The receiver gets its tensors in the order in which `sending` was called.
        """
        self._sent[receiver, tag] += 1
        message = self._message("send", tensor, self._sent[receiver, tag], tag, self.mesh.place())
        return lambda: message.send([receiver], 0, tensor)

    def receiving(self, tensor: Tensor, sender: int | None, tag: int) -> Callable[[], int]:
        """Return a function that waits for the next tensor with this tag, fills `tensor` with it,
        and returns the sender. Any thread may call it.

        Messages are given to receives in the order in which `receiving` was called.

        Args:
            sender: None: any other worker.
        """
        expected = _Expected(tuple(self.others) if sender is None else (sender,))
        pending = self._expected.setdefault(tag, [])
        pending.append(expected)
        place = self.mesh.place()

        def arrived(inbox: dict[MessageId, Message]) -> _Expected | None:
            for one in [one for one in pending if one.message is None]:
                for worker in one.senders:
                    number = self._taken[worker, tag] + 1
                    key = (self.ranks[worker], f"{self._group}/{tag}", number, 0)
                    if key in inbox:
                        self._taken[worker, tag] = number
                        one.message, one.sender = inbox.pop(key), worker
                        break
            return expected if expected.message is not None else None

        def receive() -> int:
            call = self._message("recv", tensor, 0, tag, place)
            call.meet(tensor)
            found = call.wait_for(arrived, expected.senders)
            pending.remove(found)
            assert found.message is not None
            tensor.copy_(call.tensor_of(found.message, found.sender, tensor))
            return found.sender

        return receive

    def _begin(
        self, name: str, tensor: Tensor | None, how: str = "", timeout_s: float | None = None
    ) -> _Call:
        self._number += 1
        text = f"{name}({', '.join(filter(None, (described(tensor), how)))})"
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        return _Call(self, CollectiveCall(self._group, self._number, text, self.place, limit_s))

    def _message(self, name: str, tensor: Tensor, number: int, tag: int, place: str) -> _Call:
        group, what = f"{self._group}/{tag}", f"({described(tensor)}, tag {tag})"
        call = CollectiveCall(
            group, number, f"send{what}", place, self.timeout_s, called=f"{name}{what}"
        )
        return _Call(self, call)


@dataclass(slots=True, eq=False)
class _Expected:
    """A receive that waits for a message of one of some workers; ranks of the group."""

    senders: tuple[int, ...]
    message: Message | None = None
    sender: int = -1


class _Call:
    """The messages of one collective on one worker; workers are ranks of the group."""

    def __init__(self, owner: Collectives, call: CollectiveCall) -> None:
        self._owner = owner
        self._call = call

    def send(
        self, receivers: Sequence[int], part: int, tensor: Tensor, *, lasting: bool = False
    ) -> None:
        """Send a tensor.

        Args:
            lasting: it is not written to until it is certain that it has arrived.
        """
        ranks = [self._owner.ranks[receiver] for receiver in receivers]
        device = device_of(tensor.device)
        if not device.is_host:
            ranks = self._owner.mesh.memory.lend(ranks, self._call.head(part), tensor)
            if not ranks:
                return
            on_host = device.host_memory(tensor.numel(), dtype=tensor.dtype)
            tensor, lasting = on_host.copy_(tensor, non_blocking=True), True
            device.event().synchronize()
        payload = np.from_dlpack(tensor.view(torch.uint8)).data  # `numpy()` ends `resize_`
        self._owner.mesh.send(ranks, self._call, part, payload, lasting=lasting)

    def receive(self, sender: int, part: int, like: Tensor) -> Tensor:
        """Return a tensor of the size and type of `like`.

        Raises:
            DifferentCalls: the sender's has a different size.
        """
        self.meet(like)
        message = self._owner.mesh.receive(self._owner.ranks[sender], self._call, part)
        return self.tensor_of(message, sender, like)

    def meet(self, like: Tensor) -> None:
        """Let others know whether they can lend memory of their GPUs to this worker's."""
        if not device_of(like.device).is_host:
            self._owner.mesh.memory.answer_offers(like)

    def wait_for(
        self,
        question: Callable[[dict[MessageId, Message]], _Expected | None],
        senders: Sequence[int],
    ) -> _Expected:
        """See `Mesh.wait_for`; workers are ranks of the group."""
        ranks = [self._owner.ranks[sender] for sender in senders]
        who = f"worker {ranks[0]}" if len(ranks) == 1 else "no other worker"
        otherwise = f"{who} did {'not send' if len(ranks) == 1 else 'send'} such a tensor"
        return self._owner.mesh.wait_for(question, self._call, ranks, otherwise)

    def tensor_of(self, message: Message, sender: int, like: Tensor) -> Tensor:
        """As `receive`, of a message that is here."""
        payload = self._owner.mesh.payload_of(message, self._owner.ranks[sender], self._call)
        size = payload.size if isinstance(payload, Lent) else memoryview(payload).nbytes
        if size != like.nbytes:
            raise DifferentCalls(
                f"{self._call}: worker {self._owner.ranks[sender]} sends {size} bytes, but worker "
                f"{self._owner.mesh.rank} expects {like.nbytes}; all tensors must have one size"
            )
        if not size:
            return torch.empty_like(like)
        if isinstance(payload, Lent):
            return self._owner.mesh.memory.take(self._owner.ranks[sender], payload, like)
        return torch.frombuffer(payload, dtype=torch.uint8).view(like.dtype).to(like.device)

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Send a tensor to all others. Return the tensors of all workers by rank."""
        self.send(self._owner.others, 0, tensor)
        return self.receive_all(tensor)

    def receive_all(self, own: Tensor, part: int = 0) -> list[Tensor]:
        """Return the tensors of all workers, this one's included, by rank."""
        return [
            own if rank == self._owner.rank else self.receive(rank, part, own)
            for rank in range(self._owner.size)
        ]
