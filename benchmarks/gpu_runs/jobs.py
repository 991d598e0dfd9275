"""Jobs whose workers are threads of this process and share its device, with shards as threads or
as processes.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import JobError
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.torch.distribute import join
from poseidon.torch.group import Group
from poseidon.torch.options import DistributeOptions
from poseidon.torch.update_rules import UpdateRule
from ps_server import Server, Shard, ZmqServerTransport
from ps_server.network import Network

ROOT = Path(__file__).resolve().parents[2]
LOOPBACK = "tcp://127.0.0.1:0"
TIMEOUT_S = 120.0
END_S = 20.0
TOKEN = b"one device"

How = UpdateRule | Callable[[nn.Module], torch.optim.Optimizer]
Body = Callable[[nn.Module, Group], None]


@contextmanager
def shard_threads(workers: int, count: int) -> Iterator[list[str]]:
    """Run shards as threads. Yield their addresses."""
    servers = [Server(Shard(i, workers, TOKEN), ZmqServerTransport(LOOPBACK)) for i in range(count)]
    threads = [
        threading.Thread(target=server.serve, name="shard", daemon=True) for server in servers
    ]
    for thread in threads:
        thread.start()
    try:
        yield [server.address for server in servers]
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.stop()
            thread.join(END_S)


@contextmanager
def shard_process() -> Iterator[tuple[str, bytes]]:
    """Run a shard for one worker as a process, as in a job. Yield its address and its token.

    Raises:
        JobError: it does not start.
    """
    token = secrets.token_hex(16)
    process = subprocess.Popen(
        [sys.executable, "-m", "ps_server", "--stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    drain = threading.Thread(
        target=lambda: list(process.stdout or ()), name="shard output", daemon=True
    )
    try:
        process.stdin.write(json.dumps({"token": token, "workers": 1, "address": LOOPBACK}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        event = json.loads(line) if line else {}
        if event.get("event") != "listening":
            raise JobError(f"the shard did not start: {event.get('message', 'it wrote nothing')}")
        drain.start()  # its statistics must not fill the pipe
        yield str(event["address"]), token.encode()
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if drain.ident is not None:
            drain.join(END_S)
        process.stdout.close()


def lone_worker(
    options: ExchangeOptions, address: str, token: bytes, device: torch.device
) -> WorkerContext:
    """Return the context of a job's only worker, which uses one shard."""
    return WorkerContext(
        device=device,
        member=Membership(
            network=Network(token=token, timeout_s=TIMEOUT_S),
            shards=1,
            homes=(0,),
            options=replace(options, check_replicas=0),
        ),
        connect=lambda own: [address],
    )


def train(
    workers: int,
    kind: ExchangeKind,
    build: Callable[[], nn.Module],
    how: How,
    body: Body,
    *,
    options: DistributeOptions | None = None,
    on_one_host: bool = False,
) -> list[dict[str, torch.Tensor]]:
    """Train on threads of this process. Return the `state_dict` of each worker.

    Args:
        workers: number of workers; 1 trains without shards.
        kind: the exchange.
        build: makes the module on its device, equal on all workers.
        how: the rule, or a function that makes the optimizer of a module.
        body: the training loop.
        options: of `distribute`.
        on_one_host: the workers are on one host, and sum among themselves first.
    """
    modules = [build() for _ in range(workers)]

    def run(rank: int, context: WorkerContext) -> dict[str, torch.Tensor]:
        module = modules[rank]
        rule = how if isinstance(how, UpdateRule) else how(module)
        with join(module, rule, options or DistributeOptions(), context) as group:
            body(module, group)
            group.settle()
            return {
                name: value.detach().cpu().clone() for name, value in module.state_dict().items()
            }

    if workers == 1:
        return [run(0, WorkerContext())]
    hosts = 1 if on_one_host else workers
    with (
        shard_threads(workers, 2) as addresses,
        tempfile.TemporaryDirectory(prefix="poseidon-gpu-") as folder,
        ThreadPoolExecutor(workers) as pool,
    ):
        contexts = _contexts(workers, hosts, kind, addresses, str(Path(folder) / "workers"))
        return [
            future.result() for future in [pool.submit(run, *pair) for pair in enumerate(contexts)]
        ]


def _contexts(
    workers: int, hosts: int, kind: ExchangeKind, addresses: Sequence[str], local_address: str
) -> list[WorkerContext]:
    member = Membership(
        network=Network(size=workers, token=TOKEN, timeout_s=TIMEOUT_S),
        hosts=(workers,) if hosts == 1 else (),
        shards=len(addresses),
        local_address=local_address if hosts == 1 else "",
        options=ExchangeOptions(kind=kind, check_replicas=0),
    )
    members = [
        replace(member, network=replace(member.network, rank=rank)) for rank in range(workers)
    ]
    return [WorkerContext(member=each, connect=lambda own: list(addresses)) for each in members]
