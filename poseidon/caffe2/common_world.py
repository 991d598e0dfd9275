"""Common worlds: what the shards of a run do together, over torch.distributed.

    handler = StoreHandler(FolderStore("/mnt/shared", "run_17"), run="run_17")
    world = CommonWorld(handler, "allreduce_0", rank=1, size=3)
    (total,) = world.all_reduce([gradient])

The first world of a handler is the rendezvous (`poseidon.caffe2.rendezvous`); the others need no store any more. All
shards call the same operations of a world in the same order. Sums have a fixed order of ranks: they do not depend on
which shard comes first.

Every failure is a `CollectiveError` of one sentence within the time limit of the world. It names the shards that have
ended: a thread of each process answers through the store when another shard reports a failure.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from poseidon.caffe2.rendezvous import Member, check_own, join, published_address
from poseidon.caffe2.stores import KeyTaken, Store, StoreTimeout
from poseidon.errors import JobError, UsageError
from poseidon.exchange.allreduce.process_group import Backend, GroupSettings, ProcessGroup, Rendezvous
from ps_server import PeerLost

TIMEOUT_S = 30.0
"""Default time limit of a world's operations: that of Caffe2."""
ANSWER_S = 5.0
"""How long a shard that reports a failure waits for the answers of the others."""
LOOK_S = 0.5
"""How often a shard looks whether another one has reported a failure."""
FAILED = "failed"


class CollectiveError(JobError, RuntimeError):
    """The shards do not find each other, or one of them was lost; also a RuntimeError, as Caffe2's scripts expect."""


class StoreHandler:
    """The store of a run and the shards that have met through it.

    Args:
        store: shared by all shards, with a prefix of its own for each run.
        run: the run id, for messages.
    """

    def __init__(self, store: Store, run: str) -> None:
        self.store = store
        self.run = run
        self._shards: Shards | None = None
        self._lock = threading.Lock()

    def meet(self, *, rank: int, size: int, timeout_s: float, interface: str) -> Shards:
        """Return the shards; the first call is the rendezvous.

        Args:
            rank: this shard's number.
            size: the number of shards.
            timeout_s: longest time to wait for the others.
            interface: see `published_address`; empty: the default.

        Raises:
            CollectiveError: they do not meet; see `rendezvous.join`.
        """
        with self._lock, sentences():
            if self._shards is None:
                self._shards = Shards(self, rank, size, timeout_s, interface)
            known = self._shards
            if (known.rank, known.size) != (rank, size):
                raise CollectiveError(
                    f"a common world of run '{self.run}' has rank {rank} of {size}, and an earlier one of this process "
                    f"{known.rank} of {known.size}; expected the same"
                )
            return known


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """Turn errors of stores and of the rendezvous into a `CollectiveError` with the same sentence."""
    try:
        yield
    except CollectiveError:
        raise
    except (JobError, UsageError, PeerLost) as error:
        raise CollectiveError(str(error)) from error


class Shards:
    """The shards of a run that have met.

    Attributes:
        rank: the number of this one.
        size: how many there are.
        members: all of them, by number.
        rendezvous: where process groups are formed.
    """

    def __init__(self, handler: StoreHandler, rank: int, size: int, timeout_s: float, interface: str) -> None:
        self.rank, self.size = rank, size
        self.host = published_address(interface or None)
        check_own(self.host)
        self._store = handler.store
        settings = self.settings(timeout_s)
        opened = Rendezvous(settings) if rank == 0 else None
        self.members = join(
            handler.store,
            run=handler.run,
            shard=rank,
            shards=size,
            address=self.host,
            payload=opened.address if opened else "",
            timeout_s=timeout_s,
        )
        self.rendezvous = opened or Rendezvous(settings, self.members[0].payload)
        self._names: Counter[str] = Counter()
        self._failed = threading.Event()
        self._lost: str | None = None
        self._lock = threading.Lock()
        threading.Thread(target=_answer, args=(weakref.ref(self),), name="caffe2-shards", daemon=True).start()

    def settings(self, timeout_s: float) -> GroupSettings:
        """Return the settings of a process group."""
        return GroupSettings(rank=self.rank, size=self.size, host=self.host, timeout_s=timeout_s)

    def group(self, name: str, timeout_s: float, backend: Backend = Backend.GLOO) -> ProcessGroup:
        """Form a process group. A name that is used again in the same process means another group."""
        with self._lock:
            self._names[name] += 1
            unique = f"{name}#{self._names[name]}"
        return ProcessGroup(self.rendezvous, unique, self.settings(timeout_s), backend, watch=self.look)

    def look(self) -> None:
        """Raise PeerLost when another shard has reported a failure."""
        if self._failed.is_set():
            raise PeerLost("could not go on with the other shards: one of them reports a failure")

    def explain(self, error: PeerLost) -> CollectiveError:
        """Report a failure to the other shards, and return the error that names those which do not answer."""
        self._failed.set()
        with self._lock:
            if self._lost is None:
                self._lost = self._find_lost()
        what = str(error).replace("the other workers", "the other shards")
        return CollectiveError(f"shard {self.rank} {what}; {self._lost}")

    def _find_lost(self) -> str:
        others = [member for member in self.members if member.shard != self.rank]
        keys = [_answer_key(member.shard) for member in others]
        try:
            _set_once(self._store, FAILED)
            _set_once(self._store, _answer_key(self.rank))
            with contextlib.suppress(StoreTimeout):
                self._store.wait(keys, ANSWER_S)
            missing = self._store.missing(keys)
        except JobError as error:
            return str(error)
        lost = [member for member in others if _answer_key(member.shard) in missing]
        if not lost:
            return (
                "all shards still run: check the network between them, and that each runs the same nets "
                "equally often"
            )
        return f"{' and '.join(map(_describe, lost))} ended, or cannot be reached"

    def answer(self) -> bool:
        """Answer a failure that another shard has reported; return whether there is one."""
        if self._failed.is_set():
            return True
        try:
            if self._store.find(FAILED) is None:
                return False
            _set_once(self._store, _answer_key(self.rank))
        except JobError:
            return False  # training goes on without the store
        self._failed.set()
        return True


def _describe(member: Member) -> str:
    return f"shard {member.shard} (process {member.process} on {member.host})"


def _answer_key(shard: int) -> str:
    return f"answer_{shard}"


def _set_once(store: Store, key: str) -> None:
    with contextlib.suppress(KeyTaken):
        store.set(key, b"1")


def _answer(reference: weakref.ref[Shards]) -> None:
    """Look for reported failures, on a thread, until there is one or the shards are not used any more."""
    pause = threading.Event()
    while (shards := reference()) is not None and not shards.answer():
        del shards
        pause.wait(LOOK_S)


class CommonWorld:
    """A group of all shards of a run; see the docstring of the module.

    Tensors may be on any device: those on GPUs pass through the memory of the host; sums go by NCCL with that engine.

    Args:
        handler: of the store; None where there is one shard only.
        name: the same on all shards.
        rank: this shard's number.
        size: the number of shards.
        timeout_s: longest time that an operation waits.
        interface: the network interface, or address, that the other hosts reach; empty: the default.
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
            raise CollectiveError(f"rank {rank} of a common world: expected 0 to {size - 1} for size {size}")
        if handler is None and size > 1:
            raise CollectiveError(f"a common world of {size} shards needs a store handler, none is given")
        self.rank, self.size, self.timeout_s, self.engine = rank, size, timeout_s, engine
        self._name, self._handler, self._interface = name, handler, interface
        self._shards: Shards | None = None
        self._groups: dict[Backend, ProcessGroup] = {}
        self._closed = False
        if handler is not None and size > 1:
            self._shards = handler.meet(rank=rank, size=size, timeout_s=timeout_s, interface=interface)
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
        total = tensors[0].clone()
        for other in tensors[1:]:
            total.add_(other.to(total.device))
        total = self._run(total, lambda group, moved: group.sum(moved), self.engine == "NCCL")
        return [total, *(total.to(other.device, copy=True) for other in tensors[1:])]

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> list[Tensor]:
        """Return, for each tensor, a copy of the first one of the shard `root`."""
        self._check_rank(root)
        first = self._run(tensors[0].clone(), lambda group, moved: group.broadcast(moved, root))
        return [first, *(first.to(other.device, copy=True) for other in tensors[1:])]

    def reduce(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Return the sum over all shards on the shard `root`, and a copy of the tensor on the others."""
        self._check_rank(root)
        (total,) = self.all_reduce([tensor])
        return total if self.rank == root else tensor.clone()

    def all_gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensors of all shards one after the other along the first dimension, by rank."""
        own = torch.cat([tensor.to(tensors[0].device) for tensor in tensors])
        if self.size == 1:
            return own
        whole = own.new_zeros((self.size, *own.shape))
        whole[self.rank] = own
        return self._run(whole, lambda group, moved: group.all_gather(moved, self.rank)).flatten(0, 1)

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
        self._run(torch.zeros(1), lambda group, moved: group.sum(moved))

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
        self,
        tensor: Tensor,
        start: Callable[[ProcessGroup, Tensor], Callable[[], None]],
        by_nccl: bool = False,
    ) -> Tensor:
        """Start an operation on a tensor and wait for it; return its result on the tensor's device.

        Only sums may go by NCCL: operations of several NCCL groups at a time would need one order on all shards.
        """
        if self._shards is None:
            return tensor
        nccl = by_nccl and tensor.is_cuda
        moved = (tensor if nccl else tensor.cpu()).contiguous()
        kind = moved.dtype
        if kind in (torch.bool, torch.int16):
            moved = moved.to(torch.int32)
        with self._explained():
            start(self._group(Backend.NCCL if nccl else Backend.GLOO), moved)()
        return moved.to(tensor.device, kind)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except PeerLost as error:
            assert self._shards is not None
            raise self._shards.explain(error) from error
