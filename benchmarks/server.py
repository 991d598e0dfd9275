"""Compare the bare server with a bare ZeroMQ echo of the same bytes.

    python benchmarks/server.py [--megabytes 256] [--rounds 7] [--layouts 1x1,2x2] [--sockets]

A round of the server: every worker pushes one table of so many megabytes in chunks of 2 MiB and
reads it back, which lands in the worker's array. `average`: the shards add up what the workers
sent, divide it by their number and send it: push and pull alone, as other servers' own benchmarks
have it. `momentum`: the shards apply SGD with momentum to the average, which reads and writes two
more numbers for each that came; on a machine whose cores are all busy with moving bytes, that and
the landing are what the server pays for beyond the echo. Workers and shards of one machine pass
arrays in memory, as in every job; `--sockets` makes all go through sockets, as between machines. A
round of the echo: every worker sends the same chunks over DEALER sockets to as many ROUTERs as
there are shards, and each sends every chunk back as it came; nobody looks at them. All are
processes of their own on loopback, with the malloc environment that jobs have. Server and echo take
turns within the same run, and the turn changes from round to round.

Reading the table: `server` and `echo` are the medians of the rounds' seconds (of the slowest
worker), `MB/s` the bytes of all workers, both directions, by that time. `ratio` is the median of
(echo / server) of each round: the share of the wire's own rate that is left. The promise is at
least 0.8 (average). `noise` is half the distance between the quartiles of the ratio.
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

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from poseidon.cli.checkout import use_environment

use_environment()

import numpy as np
import zmq

from poseidon.launcher.processes import child_environment
from ps_server.network import Network

CHUNK_BYTES = 2 * 2**20
WARM_UP = 2
Round = Callable[[], float]


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

        if kind == "server":
            listen = (
                "-m",
                "ps_server",
                "--listen=tcp://127.0.0.1:0",
                f"--workers={layout.workers}",
            )
            servers = [start(*listen, f"--shard={shard}") for shard in range(layout.shards)]
        else:
            servers = [start(__file__, "--role=echo") for _ in range(layout.shards)]
        addresses = ",".join(str(server.read()["address"]) for server in servers)
        common = (
            f"--megabytes={megabytes}",
            f"--addresses={addresses}",
            f"--workers={layout.workers}",
            *flags,
        )
        workers = [
            start(__file__, f"--role={kind}-worker", f"--rank={rank}", *common)
            for rank in range(layout.workers)
        ]
        for worker in workers:
            worker.read()

        def run() -> float:
            for worker in workers:
                worker.send("round")
            return max(float(str(worker.read()["seconds"])) for worker in workers)

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


def server_worker(
    addresses: Sequence[str], megabytes: int, rank: int, workers: int, average: bool, sockets: bool
) -> None:
    """Push one table and read it back."""
    from ps_server import Client, Keeping, Rule, StoreSpec, TableSpec

    size = megabytes * 2**18
    keeping = Keeping.AVERAGE if average else Keeping.GRADIENTS
    table = TableSpec(name="w", size=size, rule=Rule(momentum=0.9), keeping=keeping)
    store = StoreSpec(workers=workers, shards=len(addresses), tables=(table,))
    client = Client(
        addresses, Network(rank=rank, size=store.workers), store=store, share_memory=not sockets
    )
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


def measure(layout: Layout, megabytes: int, rounds: int, sockets: bool) -> list[str]:
    """Two rows of the table."""
    how = ("--sockets",) if sockets else ()
    with ExitStack() as stack:
        contestants = {
            name: stack.enter_context(children(layout, megabytes, kind, flags))
            for name, kind, flags in (
                ("average", "server", ("--average", *how)),
                ("momentum", "server", how),
                ("echo", "echo", ()),
            )
        }
        for run in contestants.values():
            for _ in range(WARM_UP):
                run()
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for number in range(rounds):
            for name in sorted(contestants, reverse=bool(number % 2)):
                times[name].append(contestants[name]())
    return [
        row(layout, megabytes, name, times[name], times["echo"]) for name in ("average", "momentum")
    ]


def row(
    layout: Layout, megabytes: int, name: str, server_s: Sequence[float], echo_s: Sequence[float]
) -> str:
    """One row of the table."""
    ratios = [echo / server for server, echo in zip(server_s, echo_s, strict=True)]
    server, echo = statistics.median(server_s), statistics.median(echo_s)
    moved = 2 * megabytes * layout.workers
    title = f"{layout.workers} workers x {layout.shards} shards, {name}"
    return (
        f"{title:<32} {server:9.3f} s {echo:9.3f} s {moved / server:9.0f} {moved / echo:9.0f}"
        f" {statistics.median(ratios):7.2f} {half_range(ratios):7.2f}"
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
        "--sockets", action="store_true", help="all through sockets, as between machines"
    )
    parser.add_argument(
        "--role", choices=("echo", "echo-worker", "server-worker"), help=argparse.SUPPRESS
    )
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
            options.sockets,
        )
    else:
        print(
            f"{options.megabytes} MiB a worker in chunks of 2 MiB, medians of {options.rounds} "
            "rounds"
        )
        print(
            f"{'':<32} {'server':>11} {'echo':>11} {'MB/s':>9} {'MB/s':>9} {'ratio':>7} "
            f"{'noise':>7}"
        )
        for layout in options.layouts.split(","):
            print(
                *measure(Layout.parse(layout), options.megabytes, options.rounds, options.sockets),
                sep="\n",
                flush=True,
            )
        print("ratio = echo / server, the median over the rounds; at least 0.80 is promised.")


if __name__ == "__main__":
    main()
