"""Common worlds: what the shards of a run do together, over torch.distributed.

    handler = StoreHandler(FolderStore("/mnt/shared", "run_17"), run="run_17")
    world = CommonWorld(handler, "allreduce_0", rank=1, size=3)
    (total,) = world.all_reduce([gradient])

All shards call the same operations of a world in the same order. Sums have a fixed order of ranks:
they do not depend on which shard comes first. Every failure is a `CollectiveError` of one sentence
within the time limit of the world.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from poseidon.caffe2.runtime.dag import lending
from poseidon.caffe2.shards.process_group import Backend, ProcessGroup
from poseidon.caffe2.shards.store_handler import CollectiveError, Shards, StoreHandler
from ps_server import PeerLost

TIMEOUT_S = 30.0
"""Default time limit of a world's operations, as in Caffe2."""


class CommonWorld:
    """A group of all shards of a run; see the docstring of the module.

    Tensors may be on any device: those on GPUs pass through the host, unless NCCL sums them.

    Args:
        handler: of the store; None where there is one shard only.
        name: the same on all shards.
        rank: this shard's number.
        size: the number of shards.
        timeout_s: longest time that an operation waits.
        interface: the network interface, or address, that other hosts reach; empty: default.
        engine: `GLOO` or `NCCL`.

    Raises:
        CollectiveError: the shards do not meet.
    """

    def __init__(
        self,
        handler: StoreHandler | None,
        name: str,
        *,
        rank: int,
        size: int,
        timeout_s: float = TIMEOUT_S,
        interface: str = "",
        engine: str = "GLOO",
    ) -> None:
        if not 0 <= rank < size:
            raise CollectiveError(f"rank {rank} of {size} shards: expected 0 to {size - 1}")
        if handler is None and size > 1:
            raise CollectiveError(f"a common world of {size} shards needs a store handler")
        self.rank, self.size, self.timeout_s, self.engine = rank, size, timeout_s, engine
        self._name, self._handler, self._interface = name, handler, interface
        self._shards: Shards | None = None
        self._groups: dict[Backend, ProcessGroup] = {}
        self._closed = False
        if handler is not None and size > 1:
            self._shards = handler.meet(
                rank=rank, size=size, timeout_s=timeout_s, interface=interface
            )
            self._group(Backend.GLOO)

    def clone(self, name: str) -> CommonWorld:
        """Return another world of the same shards."""
        return CommonWorld(
            self._handler,
            name,
            rank=self.rank,
            size=self.size,
            timeout_s=self.timeout_s,
            interface=self._interface,
            engine=self.engine,
        )

    def close(self) -> None:
        """End the world: operations of other shards that wait for this one fail."""
        self._closed = True
        self._groups.clear()

    def all_reduce(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return, for each tensor, the sum over all tensors of all shards.

        Args:
            tensors: of one shape and type, on any devices.
        """
        wait = self.start_all_reduce(tensors)
        with lending():
            return wait()

    def start_all_reduce(
        self, tensors: Sequence[Tensor], owned: bool = False
    ) -> Callable[[], list[Tensor]]:
        """Start `all_reduce`; return a function that waits for the sums and returns them.

        Args:
            tensors: of one shape and type, on any devices.
            owned: whether the first one may be overwritten.
        """
        return self._start(
            local_sum(tensors, owned),
            lambda group, moved: group.sum(moved),
            tensors[1:],
            self.engine == "NCCL",
        )

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> list[Tensor]:
        """Return, for each tensor, a copy of the first one of the shard `root`."""
        wait = self.start_broadcast(tensors, root)
        with lending():
            return wait()

    def start_broadcast(
        self, tensors: Sequence[Tensor], root: int = 0
    ) -> Callable[[], list[Tensor]]:
        """Start `broadcast`; return a function that waits for the copies and returns them."""
        self._check_rank(root)
        return self._start(
            tensors[0].clone(), lambda group, moved: group.broadcast(moved, root), tensors[1:]
        )

    def reduce(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Return the sum over all shards on the shard `root`, a copy of the tensor elsewhere."""
        self._check_rank(root)
        (total,) = self.all_reduce([tensor])
        return total if self.rank == root else tensor.clone()

    def all_gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return all shards' tensors joined along the first dimension, by rank.

        Each shard's tensors may have a different size in the first dimension, which may be 0.
        """
        own = torch.cat([tensor.to(tensors[0].device) for tensor in tensors])
        if self.size == 1:
            return own
        counts = self._gathered(torch.tensor([len(own)])).flatten().tolist()
        padded = own.new_zeros((max(counts), *own.shape[1:]))
        if not padded.numel():
            return own.new_zeros((sum(counts), *own.shape[1:]))
        padded[: len(own)] = own
        gathered = self._gathered(padded)
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    def _gathered(self, own: Tensor) -> Tensor:
        """Return the tensors of all shards, of one shape, stacked."""
        whole = own.new_zeros((self.size, *own.shape))
        whole[self.rank] = own
        return self._run(whole, lambda group, moved: group.all_gather(moved, self.rank))

    def reduce_scatter(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Return, for each tensor, this shard's part of the sum over all tensors of all shards.

        Args:
            tensors: of one shape; the sum is cut into parts along its flattened values.
            counts: the number of values of each shard's part.
        """
        total = self.all_reduce(tensors)[0]
        begin = sum(counts[: self.rank])
        part = total.flatten()[begin : begin + counts[self.rank]]
        return [part.to(tensor.device, copy=True) for tensor in tensors]

    def barrier(self) -> None:
        """Wait until all shards are here."""
        wait = self.start_barrier()
        with lending():
            wait()

    def start_barrier(self) -> Callable[[], object]:
        """Report that this shard is here; return a function that waits for the others."""
        return self._start(torch.zeros(1), lambda group, moved: group.sum(moved))

    def joins(self, other: CommonWorld) -> bool:
        """Return whether both worlds' sums can be one message: same shards, engine, time limit."""
        return (
            self._shards is other._shards
            and (self.engine, self.timeout_s) == (other.engine, other.timeout_s)
            and not (self._closed or other._closed)
        )

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Send a tensor to one shard."""
        self._check_rank(to)
        self._run(tensor, lambda group, moved: group.send(moved, to, tag))

    def receive(self, like: Tensor, sender: int, tag: int) -> Tensor:
        """Return what one shard has sent, a tensor of the shape and type of `like`."""
        self._check_rank(sender)
        return self._run(like.clone(), lambda group, moved: group.receive(moved, sender, tag))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank}: expected 0 to {self.size - 1}")

    def _group(self, backend: Backend) -> ProcessGroup:
        assert self._shards is not None
        if self._closed:
            raise CollectiveError(f"the common world {self._name} was destroyed")
        if backend not in self._groups:
            with self._explained():
                self._groups[backend] = self._shards.group(
                    f"{self._name}/{backend.value}", self.timeout_s, backend
                )
        return self._groups[backend]

    def _run(
        self, tensor: Tensor, start: Callable[[ProcessGroup, Tensor], Callable[[], None]]
    ) -> Tensor:
        """Run an operation on a tensor to its end; return the result on the tensor's device."""
        wait = self._start(tensor, start)
        with lending():
            return wait()[0]

    def _start(
        self,
        tensor: Tensor,
        start: Callable[[ProcessGroup, Tensor], Callable[[], None]],
        others: Sequence[Tensor] = (),
        by_nccl: bool = False,
    ) -> Callable[[], list[Tensor]]:
        """Start an operation on a tensor; return a function that waits for it.

        That function returns the result on the tensor's device, and a copy of it on the device of
        each of `others`. Only sums may go by NCCL: operations of several NCCL groups at a time
        would need one order on all shards.
        """
        if self._shards is None:
            return lambda: [tensor, *(tensor.to(other.device, copy=True) for other in others)]
        nccl = by_nccl and tensor.is_cuda
        moved = (tensor if nccl else tensor.cpu()).contiguous()
        kind = moved.dtype
        if kind in (torch.bool, torch.int16):
            moved = moved.to(torch.int32)
        with self._explained():
            wait = start(self._group(Backend.NCCL if nccl else Backend.GLOO), moved)

        def finish() -> list[Tensor]:
            with self._explained():
                wait()
            result = moved.to(tensor.device, kind)
            return [result, *(result.to(other.device, copy=True) for other in others)]

        return finish

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except PeerLost as error:
            assert self._shards is not None
            raise self._shards.explain(error) from error


def local_sum(tensors: Sequence[Tensor], owned: bool = False) -> Tensor:
    """Return this process's tensors' sum on the first's device: new, or in an owned first."""
    total = tensors[0] if owned else tensors[0].clone()
    for other in tensors[1:]:
        total.add_(other.to(total.device))
    return total
