"""Compare the bare server with gloo's all-reduce, and with a bare ZeroMQ echo of the same bytes.

    python benchmarks/server.py [--megabytes 256] [--rounds 7] [--layouts 1x1,2x2] [--memory own]

A round of the server: every worker pushes one table of so many megabytes in chunks of 2 MiB and
reads it back, which lands in the worker's array. `average`: the shards add up what the workers
sent, divide it by their number and send it: push and pull alone, as other servers' own benchmarks
have it. `momentum`: the shards apply SGD with momentum to the average, which reads and writes two
more numbers for each that came. Workers and shards of one machine pass arrays in memory, as in every
job; with `--memory=none` all go through sockets. `--memory=own` lets worker n and shard n of the
same number share memory and all others use sockets, as machines with one of each do.

A round of `all-reduce`: the workers sum the same megabytes by gloo, in buckets of 25 MiB as DDP
does, and divide them by their number. `all-reduce, momentum`: then each takes a step of torch's SGD
with momentum.

A round of the echo: every worker sends the same chunks over DEALER sockets to as many ROUTERs as
there are shards, and each sends every chunk back as it came; nobody looks at them. All are
processes of their own on loopback, with the malloc environment that jobs have. They take turns
within the same run, and the turn changes from round to round.

Reading the table: `s` is the median of the rounds' seconds (of the slowest worker), `MB/s` the bytes
of all workers, both directions, by that time. `ratio` is the median of (echo / this) of each round:
the share of the wire's own rate that is left. The promise is at least 0.8 (average, `--memory=all`).
`noise` is half the distance between the quartiles of the ratio. `core-s/GB` is the processor time of
all processes, kernel included, for a GB of gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from poseidon.cli.entry import use_environment

use_environment()

import numpy as np
import psutil
import zmq

from poseidon.launcher.processes import child_environment
from ps_server.network import Network

CHUNK_BYTES = 2 * 2**20
WARM_UP = 2
BUCKET_BYTES = 25 * 2**20


class Took(NamedTuple):
    """What a round took: seconds of the slowest worker, processor seconds of all processes."""

    seconds: float
    cpu_s: float


Round = Callable[[], Took]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """So many workers and shards."""

    workers: int
    shards: int

    @staticmethod
    def parse(text: str) -> Layout:
        """From `2x2`."""
        workers, shards = text.split("x")
        return Layout(workers=int(workers), shards=int(shards))


class Child:
    """A process of this benchmark: it prints one line when it is ready, and one after each line
    that it reads.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **child_environment(threads=1)},
        )

    def read(self) -> dict[str, object]:
        """Return the child's next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a child ended: {self._process.args}")
        return json.loads(line)

    def send(self, word: str) -> None:
        """Send one line to the child."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    @property
    def cpu_s(self) -> float:
        """Its processor seconds so far."""
        return sum(psutil.Process(self._process.pid).cpu_times()[:2])

    def end(self) -> None:
        """Let it end by itself, or end it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def children(layout: Layout, megabytes: int, kind: str, flags: Sequence[str]) -> Iterator[Round]:
    """Servers and workers of one kind; gives the function that runs one round of them all."""
    with ExitStack() as stack:

        def start(*command: str) -> Child:
            child = Child(command)
            stack.callback(child.end)
            return child

        servers: list[Child] = []
        if kind == "server":
            listen = (
                "-m",
                "ps_server",
                "--listen=tcp://127.0.0.1:0",
                f"--workers={layout.workers}",
            )
            servers = [start(*listen, f"--shard={shard}") for shard in range(layout.shards)]
        elif kind == "echo":
            servers = [start(__file__, "--role=echo") for _ in range(layout.shards)]
        meeting = Path(stack.enter_context(TemporaryDirectory())) / "workers"
        addresses = ",".join(str(server.read()["address"]) for server in servers)
        common = (
            f"--megabytes={megabytes}",
            f"--addresses={addresses or meeting}",
            f"--workers={layout.workers}",
            *flags,
        )
        workers = [
            start(__file__, f"--role={kind}-worker", f"--rank={rank}", *common)
            for rank in range(layout.workers)
        ]
        for worker in workers:
            worker.read()
        everyone = [*servers, *workers]

        def run() -> Took:
            used_s = sum(child.cpu_s for child in everyone)
            for worker in workers:
                worker.send("round")
            seconds = max(float(str(worker.read()["seconds"])) for worker in workers)
            return Took(seconds, sum(child.cpu_s for child in everyone) - used_s)

        yield run


def report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def serve_rounds(run: Callable[[], None]) -> None:
    """Run one round per line of standard input."""
    report(ready=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        run()
        report(seconds=time.perf_counter() - begun)


def echo() -> None:
    """Run a ROUTER that sends everything back until its launcher is gone."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind("tcp://127.0.0.1:*")
    report(address=socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0"))
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while sys.stdin.fileno() not in dict(poller.poll()):
        socket.send_multipart(socket.recv_multipart(copy=False), copy=False)


def echo_worker(addresses: Sequence[str], megabytes: int) -> None:
    """Send all chunks, dealt to the ROUTERs in turn; then take them all back."""
    sockets = []
    for address in addresses:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        sockets.append(socket)
    data = memoryview(np.ones(megabytes * 2**18, dtype=np.float32)).cast("B")
    chunks = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)

    def run() -> None:
        for number, chunk in enumerate(chunks):
            sockets[number % len(sockets)].send_multipart([b"chunk", chunk], copy=False)
        left = len(chunks)
        while left:
            for socket, _ in poller.poll():
                socket.recv_multipart(copy=False)
                left -= 1

    serve_rounds(run)


def gloo_worker(meeting: str, megabytes: int, rank: int, workers: int, average: bool) -> None:
    """Sum as many megabytes as the others, and divide them; take a step with them."""
    import torch
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=workers
    )
    gradient, value = torch.ones(2, megabytes * 2**18)
    buckets = gradient.split(BUCKET_BYTES // 4)
    value.grad = gradient
    optimizer = torch.optim.SGD([value], lr=1e-3, momentum=0.9)

    def run() -> None:
        sums = [distributed.all_reduce(bucket, async_op=True) for bucket in buckets]
        for bucket, total in zip(buckets, sums, strict=True):
            total.wait()
            bucket.div_(workers)
        if not average:
            optimizer.step()

    serve_rounds(run)
    distributed.destroy_process_group()


def server_worker(
    addresses: Sequence[str], megabytes: int, rank: int, workers: int, average: bool, memory: str
) -> None:
    """Push one table and read it back."""
    from ps_server import Client, Keeping, Rule, StoreSpec, TableSpec, shared_memory

    if memory == "own":
        shared_memory.is_local = lambda address: address == addresses[rank % len(addresses)]
    size = megabytes * 2**18
    keeping = Keeping.AVERAGE if average else Keeping.GRADIENTS
    table = TableSpec(name="w", size=size, rule=Rule(momentum=0.9), keeping=keeping)
    store = StoreSpec(workers=workers, shards=len(addresses), tables=(table,))
    network = Network(rank=rank, size=store.workers)
    client = Client(addresses, network, store=store, share_memory=memory != "none")
    value = np.zeros(size, dtype=np.float32)
    gradient = np.ones(size, dtype=np.float32)
    client.bind(0, value)
    client.start(lambda _: [value])
    client.read(0, value)

    def run() -> None:
        client.push(0, gradient, rate=1e-3)
        client.clock()
        client.read(0, value)

    serve_rounds(run)
    client.close()


def half_range(values: Sequence[float]) -> float:
    """Half of the distance between the quartiles; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    quartiles = statistics.quantiles(values, n=4)
    return (quartiles[2] - quartiles[0]) / 2


def measure(layout: Layout, megabytes: int, rounds: int, memory: str) -> list[str]:
    """Return the rows of a layout."""
    how = f"--memory={memory}"
    with ExitStack() as stack:
        contestants = {
            name: stack.enter_context(children(layout, megabytes, kind, flags))
            for name, kind, flags in (
                ("average", "server", ("--average", how)),
                ("momentum", "server", (how,)),
                ("all-reduce", "gloo", ("--average",)),
                ("all-reduce, momentum", "gloo", ()),
                ("echo", "echo", ()),
            )
            if kind != "gloo" or layout.workers > 1
        }
        for run in contestants.values():
            for _ in range(WARM_UP):
                run()
        took: dict[str, list[Took]] = {name: [] for name in contestants}
        for number in range(rounds):
            for name in sorted(contestants, reverse=bool(number % 2)):
                took[name].append(contestants[name]())
    return [row(layout, megabytes, name, took[name], took["echo"]) for name in contestants]


def row(
    layout: Layout, megabytes: int, name: str, took: Sequence[Took], echo: Sequence[Took]
) -> str:
    """Return one row of the table."""
    ratios = [other.seconds / own.seconds for own, other in zip(took, echo, strict=True)]
    seconds = statistics.median(own.seconds for own in took)
    cpu_s = statistics.median(own.cpu_s for own in took)
    pushed = megabytes * layout.workers
    title = f"{layout.workers} workers x {layout.shards} shards, {name}"
    return (
        f"{title:<42} {seconds:9.3f} {2 * pushed / seconds:9.0f} {statistics.median(ratios):7.2f} "
        f"{half_range(ratios):7.2f} {cpu_s / (pushed * 2**20 / 1e9):10.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--megabytes", type=int, default=256, help="MiB that each worker pushes and reads"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds that count (default %(default)s)"
    )
    parser.add_argument("--layouts", default="1x1,2x2", help="workers x shards, several by comma")
    parser.add_argument(
        "--memory",
        choices=("all", "own", "none"),
        default="all",
        help="which shards a worker shares memory with: own is the one of its number, as on "
        "machines with one of each (default %(default)s)",
    )
    roles = ("echo", "echo-worker", "gloo-worker", "server-worker")
    parser.add_argument("--role", choices=roles, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--average", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds={options.rounds}: expected 1 or more")
    if options.role == "echo":
        echo()
    elif options.role == "echo-worker":
        echo_worker(options.addresses.split(","), options.megabytes)
    elif options.role == "server-worker":
        server_worker(
            options.addresses.split(","),
            options.megabytes,
            options.rank,
            options.workers,
            options.average,
            options.memory,
        )
    elif options.role == "gloo-worker":
        gloo_worker(
            options.addresses, options.megabytes, options.rank, options.workers, options.average
        )
    else:
        print(
            f"{options.megabytes} MiB a worker in chunks of 2 MiB, medians of {options.rounds} "
            "rounds"
        )
        print(f"{'':<42} {'s':>9} {'MB/s':>9} {'ratio':>7} {'noise':>7} {'core-s/GB':>10}")
        for layout in options.layouts.split(","):
            print(
                *measure(Layout.parse(layout), options.megabytes, options.rounds, options.memory),
                sep="\n",
                flush=True,
            )
        print("ratio = seconds of the echo / of this, the median over the rounds; at least 0.80 is")
        print(
            "promised for average with --memory=all. core-s/GB: of all processes, a GB of gradients."
        )


if __name__ == "__main__":
    main()
