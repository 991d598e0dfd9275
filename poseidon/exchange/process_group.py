"""torch.distributed without its process-wide state: a meeting place, groups of processes, and errors in our words.

Law: nothing here touches the default process group, so several replicas may live in one process, and a training script
may have a default group of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ps_server import PeerLost

dist: Any = torch.distributed  # its stubs lack half of what is used here


class Backend(Enum):
    """What carries a group's operations."""

    GLOO = "gloo"
    """TCP; tensors on the CPU."""
    NCCL = "nccl"
    """NVIDIA's library; tensors on a GPU of each process."""

    @classmethod
    def of(cls, device: torch.device) -> Backend:
        """The one for tensors on `device`."""
        return cls.NCCL if device.type == "cuda" else cls.GLOO


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One process's place in a group.

    Args:
        rank: this process's rank, 0..size-1.
        size: number of processes.
        host: the address of this machine that the others reach.
        timeout_s: longest time that any operation waits.
    """

    rank: int
    size: int
    host: str
    timeout_s: float

    @property
    def timeout(self) -> datetime.timedelta:
        """`timeout_s` as torch wants it."""
        return datetime.timedelta(seconds=self.timeout_s)


def own_host(towards: str) -> str:
    """The address of this machine on the way to another one.

    Args:
        towards: a shard's address, `tcp://host:port`; nothing is sent to it.
    """
    host, _, port = towards.removeprefix("tcp://").rpartition(":")
    family, kind, protocol, _, target = socket.getaddrinfo(
        host.strip("[]"), int(port or 0), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


class MeetingPlace:
    """Where processes that form groups find each other: a small store of keys on rank 0's machine.

    Args:
        place: this process's place.
        address: what rank 0's `address` is; empty on rank 0, which opens a free port.
    """

    def __init__(self, place: Place, address: str = "") -> None:
        self.address = address
        if address:
            host, _, port = address.rpartition(" ")
            with peers("reach the meeting place"):
                self.store = dist.TCPStore(host, int(port), None, False, place.timeout, False)
        else:
            self._open(place)

    def _open(self, place: Place) -> None:
        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        with peers("open a meeting place"):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.bind((place.host, 0))
            listener.listen(place.size)
            port = int(listener.getsockname()[1])
            self.store = dist.TCPStore(
                place.host, port, None, True, place.timeout, False, master_listen_fd=listener.detach()
            )
        self.address = f"{place.host} {port}"


class Group:
    """Processes that sum and broadcast together; each must call the same operations in the same order.

    Args:
        meeting: where its processes meet.
        name: of this group, the same in all its processes; several groups may meet at one place.
        place: this process's place.
        backend: what carries it.
    """

    def __init__(
        self, meeting: MeetingPlace, name: str, place: Place, backend: Backend = Backend.GLOO
    ) -> None:
        self._place = place
        self._backend = backend
        with peers(f"form the group '{name}'"):
            self._group = _make(dist.PrefixStore(name, meeting.store), place, backend)

    def sum(self, tensor: Tensor, landed: Callable[[], None] | None = None) -> Callable[[], None]:
        """Start summing `tensor` over all processes, in place.

        Args:
            tensor: the tensor.
            landed: called once when the sum is there, from any thread; with NCCL, when it is waited for.

        Returns:
            A function that waits for it.
        """
        with peers("sum"):
            work = self._group.allreduce([tensor])
        if landed is None or self._backend is not Backend.GLOO:
            return self._waiter(work, "sum", landed)
        arrived = landed
        work.get_future().add_done_callback(lambda _: arrived())
        return self._waiter(work, "sum")

    def reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Start summing into rank 0's `tensor`; the others' hold nothing of use afterwards."""
        options = dist.ReduceOptions()
        options.rootRank = 0
        with peers("reduce"):
            return self._waiter(self._group.reduce([tensor], options), "reduce")

    def broadcast(self, tensor: Tensor) -> Callable[[], None]:
        """Start copying rank 0's `tensor` over everyone's."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with peers("broadcast"):
            return self._waiter(self._group.broadcast([tensor], options), "broadcast")

    def _waiter(self, work: Any, what: str, landed: Callable[[], None] | None = None) -> Callable[[], None]:
        def wait() -> None:
            with peers(what):
                work.wait(self._place.timeout)
            if landed is not None:
                landed()

        return wait


def _make(store: Any, place: Place, backend: Backend) -> Any:
    if backend is Backend.NCCL:
        return dist.ProcessGroupNCCL(store, place.rank, place.size, place.timeout)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=place.host)]
    options._timeout = place.timeout
    return dist.ProcessGroupGloo(store, place.rank, place.size, options)


@contextlib.contextmanager
def peers(what: str) -> Iterator[None]:
    """Say in one sentence that others have gone, where torch says so in its own words."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0].rpartition("] ")[2] if str(error) else type(error).__name__
        raise PeerLost(f"could not {what} with the other workers: {reason}") from error
