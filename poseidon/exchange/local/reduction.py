"""Reduction of tensors among the workers of one host: the contract, and how
the workers agree on one of its two kinds.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from poseidon.exchange.base import Trained
from poseidon.exchange.local.group import HostTree, LocalGroup
from poseidon.exchange.local.nccl import GroupTensors
from poseidon.exchange.local.process_group import Backend, Rendezvous
from poseidon.exchange.local.shared_memory import SharedTensors, new_file
from ps_server import RemoteProtocolError
from ps_server.network import Network

LOOPBACK = "127.0.0.1"


class Reduction(Protocol):
    """Moves flat tensors among the workers of one host.

    The leader's calls come from its engine, save for `published`, which comes from the loop's
    thread.
    """

    def contribute(self, index: int, part: Tensor | None, number: int = 0) -> None:
        """Contribute a part of tensor `index`; None counts as zero.

        The leader's part must stay as it is until `sums`.

        Args:
            index: the tensor.
            part: the sum of one of this worker's nodes.
            number: of the node among them.
        """

    def due(self, index: int) -> Sequence[int]:
        """Return the tensors whose `sums` are to be taken now, in this order.
        Leader, once all have contributed `index`.
        """

    def sums(self, index: int, own: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the sums of the host's nodes, all parts where a codec takes each, or their mean.
        Leader.

        Args:
            index: the tensor.
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
        return cls(sizes=[t.tensor.numel() for t in tensors], device=_device_name(tensors))

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
        kind: how tensors are reduced.
        address: of the store of a process group.
        by_factors: indices of the tensors that travel as factors.
        private_histories: see `ExchangeState.private`.
        schemes: of each tensor, as `Scheme` names them.
    """

    kind: ReductionKind
    address: str
    by_factors: AbstractSet[int]
    private_histories: bool
    schemes: Sequence[str] = ()

    def pack(self) -> bytes:
        fields = {
            "means": self.kind.value,
            "address": self.address,
            "by_factors": sorted(self.by_factors),
            "private_histories": self.private_histories,
            "schemes": list(self.schemes),
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
                kind=ReductionKind(fields["means"]),
                address=fields["address"],
                by_factors=frozenset(fields["by_factors"]),
                private_histories=fields["private_histories"],
                schemes=tuple(fields["schemes"]),
            )
            _check(all(isinstance(scheme, str) for scheme in welcome.schemes))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The leader's half of the agreement.

    Args:
        welcome: to be sent to the followers.
        files: to be passed on with it.
        accepted: to be called then; returns the leader's reduction.
    """

    welcome: Welcome
    files: Sequence[int]
    accepted: Callable[[], Reduction]


def default_kind(devices: Sequence[str], tree: HostTree) -> ReductionKind:
    """Return a process group where each worker has a GPU of its own; NCCL takes no two processes
    on one, and its sum has no fixed tree, which virtual workers need.
    """
    if not tree.averages:
        return ReductionKind.SHARED_MEMORY
    own = all(devices) and len(set(devices)) == len(devices)
    return ReductionKind.PROCESS_GROUP if own else ReductionKind.SHARED_MEMORY


def offer(
    tensors: Sequence[Trained],
    group: LocalGroup,
    kind: ReductionKind,
    by_factors: AbstractSet[int],
    *,
    encoded: AbstractSet[int] = frozenset(),
    private_histories: bool,
    schemes: Sequence[str] = (),
) -> Offer:
    """Return what the leader offers its followers.

    Args:
        tensors: the same on all workers.
        group: the workers of this host.
        kind: how tensors are to be reduced.
        by_factors: indices of the tensors that travel as factors.
        encoded: indices of the tensors whose parts are not added.
        private_histories: see `ExchangeState.private`.
        schemes: of each tensor, as `Scheme` names them.
    """
    rendezvous = None if kind is ReductionKind.SHARED_MEMORY else Rendezvous(_network_of(group))
    welcome = Welcome(
        kind=kind,
        address=rendezvous.address if rendezvous else "",
        by_factors=by_factors,
        private_histories=private_histories,
        schemes=tuple(schemes),
    )
    if rendezvous is None:
        file = new_file()
        return Offer(
            welcome=welcome,
            files=[file],
            accepted=lambda: _shared(tensors, group, by_factors, file, encoded),
        )
    return Offer(
        welcome=welcome,
        files=[],
        accepted=lambda: _collective(tensors, group, by_factors, rendezvous),
    )


def join(
    tensors: Sequence[Trained], group: LocalGroup, welcome: Welcome, files: Sequence[int]
) -> Reduction:
    """Return a follower's reduction, as the leader's welcome says."""
    if welcome.kind is ReductionKind.SHARED_MEMORY:
        if not files:
            raise RemoteProtocolError("the leader of this machine sent no shared memory")
        return _shared(tensors, group, welcome.by_factors, files[0])
    return _collective(
        tensors, group, welcome.by_factors, Rendezvous(_network_of(group), welcome.address)
    )


def _shared(
    tensors: Sequence[Trained],
    group: LocalGroup,
    by_factors: AbstractSet[int],
    file: int,
    encoded: AbstractSet[int] = frozenset(),
) -> SharedTensors:
    return SharedTensors(
        _flat(tensors),
        with_parts=[index not in by_factors for index in range(len(tensors))],
        local_rank=group.rank,
        tree=group.tree,
        encoded=encoded,
        file=file,
    )


def _collective(
    tensors: Sequence[Trained],
    group: LocalGroup,
    by_factors: AbstractSet[int],
    rendezvous: Rendezvous,
) -> GroupTensors:
    gradients = [i for i, t in enumerate(tensors) if not t.statistics and i not in by_factors]
    statistics = [i for i, t in enumerate(tensors) if t.statistics]
    flat = _flat(tensors)
    return GroupTensors(
        flat,
        order=[*reversed(gradients), *statistics],
        network=_network_of(group),
        rendezvous=rendezvous,
        backend=Backend.of(flat[0].device),
        watch=group.interruption.check,
    )


def _network_of(group: LocalGroup) -> Network:
    return Network(rank=group.rank, size=group.workers, host=LOOPBACK, timeout_s=group.timeout_s)


def _flat(tensors: Sequence[Trained]) -> list[Tensor]:
    return [trained.tensor.detach().view(-1) for trained in tensors]


def _device_name(tensors: Sequence[Trained]) -> str:
    device = tensors[0].tensor.device if tensors else torch.device("cpu")
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)
