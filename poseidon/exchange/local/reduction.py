"""How tensors move among the workers of one machine: the contract, and how they agree on one of its two kinds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from poseidon.exchange.base import Trained
from poseidon.exchange.local.group import LocalGroup
from poseidon.exchange.local.nccl import GroupTensors
from poseidon.exchange.local.shared_memory import SharedTensors, new_file
from poseidon.exchange.process_group import Backend, MeetingPlace, Place

LOOPBACK = "127.0.0.1"


class Reduction(Protocol):
    """Moves flat tensors among the workers of one machine.

    The leader's calls come from its engine, save for `published`, which comes from the loop's thread.
    """

    def give(self, index: int, part: Tensor | None) -> None:
        """Hand over this worker's part of tensor `index`; None counts as zero.

        The leader's part must stay as it is until `mean`.
        """

    def due(self, index: int) -> Sequence[int]:
        """Leader, once all have given `index`: the tensors whose `mean` is to be taken now, in this order."""

    def mean(self, index: int, own: Tensor) -> Tensor:
        """Leader: the mean of all parts.

        Args:
            index: the tensor.
            own: the leader's part; overwritten.
        """

    def publish(self, index: int) -> None:
        """Leader: begin to give the tensor's value to the others; in the tensors' order, all of them."""

    def published(self, index: int) -> None:
        """Leader, once the others have been told: return when the tensor may be written to; once a publication."""

    def receive(self, index: int) -> None:
        """Others, once told: take the tensor's value. Each tensor once for every publication, in any order."""

    def close(self) -> None:
        """Let go of what this holds."""


class Means(Enum):
    """How tensors move within a machine."""

    SHARED_MEMORY = "shared memory"
    """Memory of the host that the processes share."""
    PROCESS_GROUP = "process group"
    """Collective operations of torch.distributed: NCCL, where each worker has a GPU of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a worker tells its leader.

    Args:
        sizes: elements of each tensor.
        device: a name of its device that no other device of the machine has; empty: the CPU.
    """

    sizes: list[int]
    device: str

    @classmethod
    def of(cls, tensors: Sequence[Trained]) -> Hello:
        """The hello of a worker with these tensors."""
        return cls(sizes=[t.tensor.numel() for t in tensors], device=_device_name(tensors))

    def pack(self) -> bytes:
        """As bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, packed: bytes | bytearray) -> Hello:
        """The inverse of `pack`."""
        return cls(**json.loads(packed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What a leader tells the others.

    Args:
        means: how tensors move.
        address: where a process group meets.
        by_factors: indices of the tensors that travel as factors.
        private_histories: see `ExchangeState.private`.
    """

    means: Means
    address: str
    by_factors: AbstractSet[int]
    private_histories: bool

    def pack(self) -> bytes:
        """As bytes."""
        fields = {
            "means": self.means.value,
            "address": self.address,
            "by_factors": sorted(self.by_factors),
            "private_histories": self.private_histories,
        }
        return json.dumps(fields).encode()

    @classmethod
    def unpack(cls, packed: bytes | bytearray) -> Welcome:
        """The inverse of `pack`."""
        fields = json.loads(packed)
        return cls(
            means=Means(fields["means"]),
            address=fields["address"],
            by_factors=frozenset(fields["by_factors"]),
            private_histories=fields["private_histories"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A leader's half of an agreement.

    Args:
        welcome: to be told to the others.
        files: to be handed over with it.
        accepted: to be called then; gives the leader's reduction.
    """

    welcome: Welcome
    files: Sequence[int]
    accepted: Callable[[], Reduction]


def usual_means(devices: Sequence[str]) -> Means:
    """A process group where each worker has a GPU of its own; NCCL takes no two processes on one."""
    own = all(devices) and len(set(devices)) == len(devices)
    return Means.PROCESS_GROUP if own else Means.SHARED_MEMORY


def offer(
    tensors: Sequence[Trained],
    group: LocalGroup,
    means: Means,
    by_factors: AbstractSet[int],
    *,
    private_histories: bool,
) -> Offer:
    """What the leader offers the others.

    Args:
        tensors: the same on all workers.
        group: the leader's place.
        means: how tensors are to move.
        by_factors: indices of the tensors that travel as factors.
        private_histories: see `ExchangeState.private`.
    """
    meeting = None if means is Means.SHARED_MEMORY else MeetingPlace(_place(group))
    welcome = Welcome(
        means=means,
        address=meeting.address if meeting else "",
        by_factors=by_factors,
        private_histories=private_histories,
    )
    if meeting is None:
        file = new_file()
        return Offer(
            welcome=welcome, files=[file], accepted=lambda: _shared(tensors, group, by_factors, file)
        )
    return Offer(welcome=welcome, files=[], accepted=lambda: _collective(tensors, group, by_factors, meeting))


def follow(tensors: Sequence[Trained], group: LocalGroup, said: Welcome, files: Sequence[int]) -> Reduction:
    """The others' half of the agreement."""
    if said.means is Means.SHARED_MEMORY:
        return _shared(tensors, group, said.by_factors, files[0])
    return _collective(tensors, group, said.by_factors, MeetingPlace(_place(group), said.address))


def _shared(
    tensors: Sequence[Trained], group: LocalGroup, by_factors: AbstractSet[int], file: int
) -> SharedTensors:
    return SharedTensors(
        _flat(tensors),
        with_parts=[index not in by_factors for index in range(len(tensors))],
        local_rank=group.rank,
        local_workers=group.workers,
        file=file,
    )


def _collective(
    tensors: Sequence[Trained], group: LocalGroup, by_factors: AbstractSet[int], meeting: MeetingPlace
) -> GroupTensors:
    gradients = [i for i, t in enumerate(tensors) if not t.statistics and i not in by_factors]
    statistics = [i for i, t in enumerate(tensors) if t.statistics]
    flat = _flat(tensors)
    return GroupTensors(
        flat,
        order=[*reversed(gradients), *statistics],
        place=_place(group),
        meeting=meeting,
        backend=Backend.of(flat[0].device),
    )


def _place(group: LocalGroup) -> Place:
    return Place(rank=group.rank, size=group.workers, host=LOOPBACK, timeout_s=group.timeout_s)


def _flat(tensors: Sequence[Trained]) -> list[Tensor]:
    return [trained.tensor.detach().view(-1) for trained in tensors]


def _device_name(tensors: Sequence[Trained]) -> str:
    device = tensors[0].tensor.device if tensors else torch.device("cpu")
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)
