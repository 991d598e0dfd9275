"""Reduction of tensors among the workers of one host: the contract, and how
the workers agree on one of its two kinds.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from poseidon.exchange.base import Trained
from poseidon.exchange.kinds import Scheme
from poseidon.exchange.local.group import HostTree, LocalGroup
from poseidon.exchange.local.nccl import GroupTensors
from poseidon.exchange.local.process_group import Backend, Rendezvous
from poseidon.exchange.local.shared_memory import SharedTensors, new_file
from ps_server import RemoteProtocolError

Ground = Rendezvous | int
"""Over what tensors move: where the processes of a group find each other, or the open file of
shared memory.
"""


class Reduction(Protocol):
    """Moves flat tensors among the workers of one host.

    The leader's calls come from its loop (`leader_loop.py`), save for `published`, which comes from
    the thread that trains.
    """

    def contribute(self, index: int, part: Tensor | None, number: int = 0) -> None:
        """Contribute a part of tensor `index`; None counts as zero.

        The leader's part must stay as it is until `sums`.

        Args:
            part: the sum of one of this worker's nodes.
        """

    def due(self, index: int) -> Sequence[int]:
        """Return the tensors whose `sums` are to be taken now, in this order.
        Leader, once all have contributed `index`.
        """

    def sums(self, index: int, own: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the sums of the host's nodes, all parts where a codec takes each, or their mean.
        Leader.

        Args:
            own: the leader's parts; overwritten.
        """

    def publish(self, index: int) -> None:
        """Begin to send the tensor's value to the followers.

        Leader, for all tensors in their order.
        """

    def published(self, index: int) -> None:
        """Return when the tensor may be written to.

        Leader, once the followers are notified, once a publication.
        """

    def receive(self, index: int) -> None:
        """Copy the tensor's value.

        Followers, once notified, each tensor once a publication, in any order.
        """

    def close(self) -> None:
        """Free memory and groups."""


class ReductionKind(Enum):
    """The kinds of reduction."""

    SHARED_MEMORY = "shared memory"
    """Memory of the host that the processes share."""
    PROCESS_GROUP = "process group"
    """Collective operations of torch.distributed: NCCL, where each worker has a GPU of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a follower.

    Args:
        sizes: elements of each tensor.
        device: a name of its device that no other device of the host has; empty: the CPU.
    """

    sizes: list[int]
    device: str

    @classmethod
    def of(cls, tensors: Sequence[Trained]) -> Hello:
        """Return the hello of a worker with these tensors."""
        device = tensors[0].tensor.device if tensors else torch.device("cpu")
        is_gpu = device.type == "cuda"
        name = str(torch.cuda.get_device_properties(device).uuid) if is_gpu else ""
        return cls(sizes=[t.tensor.numel() for t in tensors], device=name)

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, packed: bytes | bytearray) -> Hello:
        """Return what `pack` packed.

        Raises:
            RemoteProtocolError: it is something else.
        """
        with _readable("a worker", "a hello"):
            hello = cls(**json.loads(packed))
            _check(isinstance(hello.sizes, list) and all(type(size) is int for size in hello.sizes))
            _check(isinstance(hello.device, str))
            return hello


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The leader's answer to every follower.

    Args:
        address: of the store of a process group; empty: shared memory.
        schemes: of each tensor.
    """

    address: str
    by_factors: AbstractSet[int]
    private_histories: bool
    schemes: Sequence[Scheme] = ()

    def pack(self) -> bytes:
        fields = {
            "address": self.address,
            "by_factors": sorted(self.by_factors),
            "private_histories": self.private_histories,
            "schemes": [scheme.value for scheme in self.schemes],
        }
        return json.dumps(fields).encode()

    @classmethod
    def unpack(cls, packed: bytes | bytearray) -> Welcome:
        """Return what `pack` packed.

        Raises:
            RemoteProtocolError: it is something else.
        """
        with _readable("the leader", "a welcome"):
            fields = json.loads(packed)
            welcome = cls(
                address=fields["address"],
                by_factors=frozenset(fields["by_factors"]),
                private_histories=fields["private_histories"],
                schemes=tuple(map(Scheme, fields["schemes"])),
            )
            _check(isinstance(welcome.address, str) and isinstance(welcome.private_histories, bool))
            _check(all(type(index) is int for index in welcome.by_factors))
            return welcome


@contextlib.contextmanager
def _readable(sender: str, what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RemoteProtocolError(
            f"{sender} of this machine sent {what} that cannot be read; expected one of this "
            "version of Poseidon"
        ) from error


def _check(fits: bool) -> None:
    if not fits:
        raise TypeError


def default_kind(devices: Sequence[str], tree: HostTree) -> ReductionKind:
    """Return a process group where each worker has a GPU of its own; NCCL takes no two processes
    on one, and its sum has no fixed tree, which virtual workers need.
    """
    if not tree.averages:
        return ReductionKind.SHARED_MEMORY
    own = all(devices) and len(set(devices)) == len(devices)
    return ReductionKind.PROCESS_GROUP if own else ReductionKind.SHARED_MEMORY


def ground_of(kind: ReductionKind, group: LocalGroup) -> Ground:
    """Return what the leader makes for the reduction of its host."""
    return new_file() if kind is ReductionKind.SHARED_MEMORY else Rendezvous(group.network)


def join(
    tensors: Sequence[Trained], group: LocalGroup, welcome: Welcome, files: Sequence[int]
) -> Reduction:
    """Return a follower's reduction, as the leader's welcome says."""
    if welcome.address:
        rendezvous = Rendezvous(group.network, welcome.address)
        return reduction_over(rendezvous, tensors, group, welcome.by_factors)
    if not files:
        raise RemoteProtocolError("the leader of this machine sent no shared memory")
    return reduction_over(files[0], tensors, group, welcome.by_factors)


def reduction_over(
    ground: Ground,
    tensors: Sequence[Trained],
    group: LocalGroup,
    by_factors: AbstractSet[int],
    encoded: AbstractSet[int] = frozenset(),
) -> Reduction:
    """Return the reduction of a worker. All workers of the host call it together.

    Args:
        ground: made by the leader.
        tensors: the same on all workers.
        encoded: on the leader, indices of the tensors whose parts are not added.
    """
    flat = [trained.tensor.detach().view(-1) for trained in tensors]
    if not isinstance(ground, Rendezvous):
        return SharedTensors(
            flat,
            with_parts=[index not in by_factors for index in range(len(tensors))],
            local_rank=group.network.rank,
            tree=group.tree,
            encoded=encoded,
            file=ground,
        )
    gradients = [i for i, t in enumerate(tensors) if not t.statistics and i not in by_factors]
    statistics = [i for i, t in enumerate(tensors) if t.statistics]
    return GroupTensors(
        flat,
        order=[*reversed(gradients), *statistics],
        network=group.network,
        rendezvous=ground,
        backend=Backend.of(flat[0].device),
        watch=group.network.interruption.check,
    )
