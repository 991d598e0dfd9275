"""torch.distributed without its process-wide state: a rendezvous, groups of processes, and errors in our words.

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
    """The library that carries out the operations of a group."""

    GLOO = "gloo"
    """TCP; tensors on the CPU."""
    NCCL = "nccl"
    """NVIDIA's library; tensors on a GPU of each process."""

    @classmethod
    def of(cls, device: torch.device) -> Backend:
        """Return the backend for tensors on `device`."""
        return cls.NCCL if device.type == "cuda" else cls.GLOO


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """The settings of one process of a group.

    Args:
        rank: this process's rank, 0..size-1.
        size: number of processes.
        host: the address at which the other hosts reach this one.
        timeout_s: longest time that any operation waits.
    """

    rank: int
    size: int
    host: str
    timeout_s: float

    @property
    def timeout(self) -> datetime.timedelta:
        """`timeout_s` as the type that torch takes."""
        return datetime.timedelta(seconds=self.timeout_s)


def own_host(towards: str) -> str:
    """Return the address of this host on the route to another one.

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


class Rendezvous:
    """Where the processes of groups find each other: torch's key-value store on the host of rank 0.

    Args:
        settings: of this process.
        address: `address` of rank 0's rendezvous; empty on rank 0, which listens on a free port.
    """

    def __init__(self, settings: GroupSettings, address: str = "") -> None:
        self.address = address
        if address:
            host, _, port = address.rpartition(" ")
            with torch_errors("reach the rendezvous"):
                self.store = dist.TCPStore(host, int(port), None, False, settings.timeout, False)
        else:
            self._open(settings)

    def _open(self, settings: GroupSettings) -> None:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        with torch_errors("open a rendezvous"):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.bind((settings.host, 0))
            listener.listen(settings.size)
            port = int(listener.getsockname()[1])
            self.store = dist.TCPStore(
                settings.host, port, None, True, settings.timeout, False, master_listen_fd=listener.detach()
            )
        self.address = f"{settings.host} {port}"


class ProcessGroup:
    """Processes that sum and broadcast together. All of them call the same operations in the same order.

    Args:
        rendezvous: where its processes find each other.
        name: of this group, the same in all its processes. Several groups may use one rendezvous.
        settings: of this process.
        backend: carries out its operations.
    """

    def __init__(
        self, rendezvous: Rendezvous, name: str, settings: GroupSettings, backend: Backend = Backend.GLOO
    ) -> None:
        self._settings = settings
        self._backend = backend
        with torch_errors(f"form the group '{name}'"):
            self._group = _make(dist.PrefixStore(name, rendezvous.store), settings, backend)

    def sum(self, tensor: Tensor, on_done: Callable[[], None] | None = None) -> Callable[[], None]:
        """Start to sum `tensor` over all processes, in place.

        Args:
            tensor: the tensor.
            on_done: called once when the sum is complete, from any thread; with NCCL, when it is waited for.

        Returns:
            A function that waits for it.
        """
        with torch_errors("sum"):
            work = self._group.allreduce([tensor])
        if on_done is None or self._backend is not Backend.GLOO:
            return self._waiter(work, "sum", on_done)
        done = on_done
        work.get_future().add_done_callback(lambda _: done())
        return self._waiter(work, "sum")

    def reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Start to sum into rank 0's `tensor`. The tensors of the others are undefined afterwards."""
        options = dist.ReduceOptions()
        options.rootRank = 0
        with torch_errors("reduce"):
            return self._waiter(self._group.reduce([tensor], options), "reduce")

    def broadcast(self, tensor: Tensor) -> Callable[[], None]:
        """Start to copy rank 0's `tensor` to all processes."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with torch_errors("broadcast"):
            return self._waiter(self._group.broadcast([tensor], options), "broadcast")

    def _waiter(self, work: Any, what: str, on_done: Callable[[], None] | None = None) -> Callable[[], None]:
        def wait() -> None:
            with torch_errors(what):
                work.wait(self._settings.timeout)
            if on_done is not None:
                on_done()

        return wait


def _make(store: Any, settings: GroupSettings, backend: Backend) -> Any:
    if backend is Backend.NCCL:
        return dist.ProcessGroupNCCL(store, settings.rank, settings.size, settings.timeout)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=settings.host)]
    options._timeout = settings.timeout
    return dist.ProcessGroupGloo(store, settings.rank, settings.size, options)


@contextlib.contextmanager
def torch_errors(what: str) -> Iterator[None]:
    """Turn the errors of torch.distributed into a `PeerLost` of one sentence.

    Args:
        what: the operation, an infinitive: `sum`.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0].rpartition("] ")[2] if str(error) else type(error).__name__
        raise PeerLost(f"could not {what} with the other workers: {reason}") from error
