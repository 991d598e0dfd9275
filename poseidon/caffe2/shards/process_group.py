"""torch.distributed without global state: rendezvous, process groups, our own errors.

Law: nothing here touches the default process group, so several replicas may live in one process,
and a training script may have a default group of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ps_server import PeerLost
from ps_server.network import Network

WATCH_S = 1.0
"""How often an operation that waits calls `watch`."""

dist: Any = torch.distributed  # its stubs lack half of what is used here
Waiter = Callable[[], None]
"""Waits for an operation to end."""


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


class Rendezvous:
    """Where the processes of groups find each other: torch's key-value store on the host of rank 0.

    Args:
        address: `address` of rank 0's rendezvous, `tcp://host:port`; empty on rank 0: a free port.

    Attributes:
        address: where rank 0 listens.
    """

    def __init__(self, network: Network, address: str = "") -> None:
        self.address = address
        if address:
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            with torch_errors("reach the rendezvous"):
                self.store = dist.TCPStore(
                    host.strip("[]"), int(port), None, False, _timeout(network), False
                )
        else:
            self._open(network)

    def _open(self, network: Network) -> None:
        host = network.bare_host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with torch_errors("open a rendezvous"):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.bind((host, 0))
            listener.listen(network.size)
            port = int(listener.getsockname()[1])
            self.store = dist.TCPStore(
                host, port, None, True, _timeout(network), False, master_listen_fd=listener.detach()
            )
        self.address = f"tcp://{network.host}:{port}"


class ProcessGroup:
    """Processes that sum and broadcast together.

    All of them call the same operations in the same order.

    Args:
        name: of this group, the same in all its processes. Several groups may use one rendezvous.
        watch: called every second while an operation of gloo waits; what it raises ends the wait.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        name: str,
        network: Network,
        backend: Backend = Backend.GLOO,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self._network = network
        self._backend = backend
        self._watch = watch if backend is Backend.GLOO else None
        with torch_errors(f"form the group '{name}'"):
            self._group = _make(dist.PrefixStore(name, rendezvous.store), network, backend)
            if backend is Backend.GLOO:
                # Without it a process that leaves at once breaks connections that others are still
                # making.
                self._group.barrier().wait(_timeout(network))

    def sum(self, tensor: Tensor) -> Waiter:
        """Start to sum `tensor` over all processes, in place."""
        with torch_errors("sum"):
            return self._waiter(self._group.allreduce([tensor]), "sum")

    def reduce(self, tensor: Tensor) -> Waiter:
        """Start to sum into rank 0's `tensor`.

        The tensors of the others are undefined afterwards.
        """
        options = dist.ReduceOptions()
        options.rootRank = 0
        with torch_errors("reduce"):
            return self._waiter(self._group.reduce([tensor], options), "reduce")

    def broadcast(self, tensor: Tensor, root: int = 0) -> Waiter:
        """Start to copy the `tensor` of the rank `root` to all processes."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        with torch_errors("broadcast"):
            return self._waiter(self._group.broadcast([tensor], options), "broadcast")

    def all_gather(self, whole: Tensor, rank: int) -> Waiter:
        """Start to fill `whole[i]` with rank i's tensor everywhere; ours is `whole[rank]`."""
        with torch_errors("gather"):
            work = self._group.allgather([list(whole.unbind())], [whole[rank].clone()])
            return self._waiter(work, "gather")

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Waiter:
        """Start to send `tensor` to one process."""
        with torch_errors("send"):
            return self._waiter(self._group.send([tensor], to, tag), "send", watched=False)

    def receive(self, tensor: Tensor, sender: int, tag: int = 0) -> Waiter:
        """Start to fill `tensor` with what one process sends."""
        with torch_errors("receive"):
            return self._waiter(self._group.recv([tensor], sender, tag), "receive", watched=False)

    def _waiter(self, work: Any, what: str, watched: bool = True) -> Waiter:
        def wait() -> None:
            with torch_errors(what):
                self._await(work, watched)

        return wait

    def _await(self, work: Any, watched: bool) -> None:
        """Wait in short steps, where gloo allows it: a failed wait ends messages between two."""
        if self._watch is None or not watched:
            work.wait(_timeout(self._network))
            return
        deadline = time.monotonic() + self._network.timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                work.wait(datetime.timedelta(seconds=max(min(left, WATCH_S), 0.001)))
                return
            except RuntimeError:
                if work.is_completed() or left <= 0:
                    raise
            self._watch()


def _timeout(network: Network) -> datetime.timedelta:
    return datetime.timedelta(seconds=network.timeout_s)


def _make(store: Any, network: Network, backend: Backend) -> Any:
    if backend is Backend.NCCL:
        return dist.ProcessGroupNCCL(store, network.rank, network.size, _timeout(network))
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=network.bare_host)]
    options._timeout = _timeout(network)
    return dist.ProcessGroupGloo(store, network.rank, network.size, options)


ADVICE = ". This is typically caused by"
"""The start of what torch advises after the cause: logs and reports to its authors."""


@contextlib.contextmanager
def torch_errors(what: str) -> Iterator[None]:
    """Turn the errors of torch.distributed into a `PeerLost` of one sentence.

    Args:
        what: the operation, an infinitive: `sum`.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        reason = (
            str(error).splitlines()[0].rpartition("] ")[2] if str(error) else type(error).__name__
        )
        reason = reason.partition(ADVICE)[0]
        raise PeerLost(f"could not {what} with the other workers: {reason}") from error
