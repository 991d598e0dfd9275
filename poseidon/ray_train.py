"""Ray Train over Poseidon's connections: `TorchTrainer(..., torch_config=PoseidonConfig())`.

Ray starts the workers and restarts them. torch.distributed's default group is the process group
"poseidon", so DistributedDataParallel and collectives travel over it, encrypted between nodes.
There are no shards: DistributedDataParallel reduces its buckets by all-reduce, and the workers
compare their weights meanwhile.

Law: workers exchange public keys and addresses through an actor of Ray, whose connections they
trust.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import ray.train
import torch.distributed
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, get_device

from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeOptions
from poseidon.torch.ddp_replicas import modules_compared
from poseidon.torch.process_group.backend import PoseidonGroup
from poseidon.torch.process_group.functions import groups_of_job, initialize, register
from poseidon.torch.process_group.mesh import Mesh
from ps_server.keys import KeyPair, Keyring
from ps_server.network import Network


@dataclass
class PoseidonConfig(TorchConfig):  # type: ignore[misc]
    """The process group "poseidon" in place of gloo and NCCL.

    Attributes:
        encrypt: whether traffic is encrypted; None: where the workers have several nodes.
        timeout_s: the longest time that a call waits for another worker; of TorchConfig, as are
            `backend` and `init_method`, which have no effect.
        check_replicas: steps between comparisons of the weights of DistributedDataParallel; 0: they
            are never compared.
    """

    encrypt: bool | None = None
    check_replicas: int = DEFAULT_OPTIONS.check_replicas

    @property
    def backend_cls(self) -> type[PoseidonBackend]:
        return PoseidonBackend

    def to_dict(self) -> dict[str, Any]:
        return {
            "backend": "poseidon",
            "encrypt": self.encrypt,
            "timeout_s": self.timeout_s,
            "check_replicas": self.check_replicas,
        }


class PoseidonBackend(Backend):  # type: ignore[misc]
    """Makes and ends the process group of a group of Ray's workers. Ray calls its methods."""

    share_cuda_visible_devices = True

    def on_training_start(self, worker_group: Any, backend_config: PoseidonConfig) -> None:
        """Make the process group on all workers."""
        hosts = worker_group.execute(ray.util.get_node_ip_address)
        encrypt = backend_config.encrypt
        if encrypt is None:
            encrypt = len(set(hosts)) > 1
        meeting = ray.remote(Meeting).options(num_cpus=0).remote(len(hosts))
        token, timeout_s = secrets.token_bytes(32), backend_config.timeout_s
        options = ExchangeOptions(check_replicas=backend_config.check_replicas)
        worker_group.execute(join, meeting, token, timeout_s, options, encrypt=encrypt)

    def on_shutdown(self, worker_group: Any, backend_config: PoseidonConfig) -> None:
        """End the process group on all workers."""
        worker_group.execute(leave)


class Meeting:
    """An actor at which all workers exchange payloads, any number of times.

    Args:
        size: the number of workers.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._rounds: dict[int, dict[int, str]] = {}
        self._arrived = asyncio.Condition()

    async def gather(self, number: int, rank: int, payload: str) -> Sequence[str]:
        """Wait until all workers have given their payloads, and return these by rank.

        Args:
            number: how many rounds were before this one.
            rank: the worker's.
            payload: what the others get.
        """
        async with self._arrived:
            payloads = self._rounds.setdefault(number, {})
            payloads[rank] = payload
            self._arrived.notify_all()
            await self._arrived.wait_for(lambda: len(payloads) == self._size)
            return [payloads[rank] for rank in range(self._size)]


def join(
    meeting: Any, token: bytes, timeout_s: int, options: ExchangeOptions, *, encrypt: bool
) -> None:
    """Make the process group on this worker, and connect it with all others.

    Args:
        meeting: an actor, `Meeting`.
        token: the secret of these workers.
        timeout_s: the longest time that a call waits.
        options: how often the replicas are compared.
        encrypt: whether the traffic is encrypted.
    """
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    host = ray.util.get_node_ip_address()
    rounds = itertools.count()

    def gather(payload: str) -> Sequence[str]:
        answer = meeting.gather.remote(next(rounds), rank, payload)
        payloads: Sequence[str] = ray.get(answer, timeout=timeout_s)
        return payloads

    address = f"[{host}]" if ":" in host else host
    keys = Keyring(own=KeyPair.new(), admit=()) if encrypt else None
    network = Network(
        rank=rank, size=size, host=address, token=token, keys=keys, timeout_s=timeout_s
    )
    # as torchrun and Ray's own backend; accelerate reads the last one
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
        "ACCELERATE_TORCH_DEVICE": str(get_device()),
    }
    mesh = Mesh(network, gather)
    register(mesh)
    mesh.at_close.enter_context(groups_of_job())
    mesh.at_close.enter_context(modules_compared(options))
    initialize(mesh, timeout=timedelta(seconds=timeout_s))
    torch.distributed.barrier()


def leave() -> None:
    """End the process group on this worker."""
    group = torch.distributed.group.WORLD
    if isinstance(group, PoseidonGroup):
        torch.distributed.destroy_process_group()
        group.mesh.close()
