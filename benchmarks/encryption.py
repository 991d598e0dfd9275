#!/usr/bin/env python3
"""Measure what encryption costs: messages between two processes of this machine, by turns in
clear, with ZeroMQ's CURVE, and sealed as a job between machines does it.

    python benchmarks/encryption.py
    python benchmarks/encryption.py --sizes 1024,2097152 --rounds 9

How to read it: one row a size and kind. `Gbit/s` is one sender and one receiver, `of clear` that
rate as a part of the one in clear, `round trip` one message there and a short answer back. `sender`
and `receiver` are the processor seconds of each process for a gigabyte, all its threads and the
kernel included (getrusage). Medians over the rounds, in which the kinds take turns. Over loopback
nothing else is in the way, so this is the worst case.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import zmq

from poseidon.launcher.processes import child_environment
from ps_server.keys import JobKeys
from ps_server.transport.base import Frames
from ps_server.transport.zmq_sockets import (
    RECEIVE_MESSAGES,
    SEND_BUFFER_BYTES,
    SEND_MESSAGES,
    ZmqClientTransport,
    ZmqServerTransport,
)

SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 21, 1 << 23)
ROUND_BYTES = 64 << 20
MOST_MESSAGES = 4_000
TRIPS = 50
WAIT_S = 30.0
HEAD = ("size", "kind", "Gbit/s", "of clear", "round trip us", "sender s/GB", "receiver s/GB")


class Kind(Enum):
    """How the two processes are connected."""

    CLEAR = "clear"
    """The transport without keys."""
    CURVE = "CURVE"
    """pyzmq's sockets with CURVE, for comparison: no job uses them."""
    SEALED = "sealed"
    """The transport with keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round has measured.

    Attributes:
        gbit_per_s: throughput.
        trip_us: of one message and its answer.
        sender_s: processor seconds of the sender for a gigabyte.
        receiver_s: and of the receiver.
    """

    gbit_per_s: float
    trip_us: float
    sender_s: float
    receiver_s: float


class CurveServer:
    """A ROUTER with CURVE, which admits every key."""

    def __init__(self, keys: JobKeys) -> None:
        self._socket = _curve_socket(zmq.ROUTER, keys)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        if not self._socket.poll(round(timeout_s * 1000)):
            return []
        peer, *frames = self._socket.recv_multipart(copy=False)
        return [(peer.bytes, [frame.buffer for frame in frames])]

    def known(self, peer: bytes) -> None:
        """Do nothing."""

    def send(self, peer: bytes, frames: Frames) -> bool:
        self._socket.send_multipart([peer, *frames], copy=False)
        return True

    def close(self) -> None:
        self._socket.context.destroy()


class CurveClient:
    """A DEALER with CURVE."""

    def __init__(self, address: str, keys: JobKeys) -> None:
        self._socket = _curve_socket(zmq.DEALER, keys)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(keys.workers[0].public))
        self._socket.connect(address)

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        waits = zmq.POLLIN if timeout_s >= 1 else zmq.POLLIN | zmq.POLLOUT
        if not self._socket.poll(round(timeout_s * 1000), waits) & zmq.POLLIN:
            return []
        return [(0, [frame.buffer for frame in self._socket.recv_multipart(copy=False)])]

    def send(self, shard: int, frames: Frames) -> bool:
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
            return True
        return False

    def close(self) -> None:
        self._socket.context.destroy()


def _curve_socket(kind: int, keys: JobKeys) -> zmq.Socket[bytes]:
    """Return a socket like the transport's. One pair serves both ends."""
    socket = zmq.Context().socket(kind)
    socket.setsockopt(zmq.SNDHWM, SEND_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_MESSAGES)
    socket.setsockopt(zmq.SNDBUF, SEND_BUFFER_BYTES)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(keys.workers[0].public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(keys.workers[0].secret))
    return socket


def _server(kind: Kind, keys: JobKeys) -> ZmqServerTransport | CurveServer:
    if kind is Kind.CURVE:
        return CurveServer(keys)
    return ZmqServerTransport(
        "tcp://127.0.0.1:0", keys.of_shard(0) if kind is Kind.SEALED else None
    )


def _client(kind: Kind, address: str, keys: JobKeys) -> ZmqClientTransport | CurveClient:
    if kind is Kind.CURVE:
        return CurveClient(address, keys)
    return ZmqClientTransport([address], keys.of_worker(0) if kind is Kind.SEALED else None)


def answer(pipe: Connection, kind: Kind, keys: JobKeys) -> None:
    """Be the receiver, in its process: send its address, then answer each message whose first
    frame asks for it.
    """
    transport = _server(kind, keys)
    pipe.send(transport.address)
    try:
        while not pipe.poll():
            for peer, frames in transport.receive(0.2):
                if bytes(frames[0]) == b"answer":
                    transport.known(peer)
                    while not transport.send(peer, [b"%f" % time.process_time()]):
                        transport.receive(0.01)
    finally:
        transport.close()


class Line:
    """A sender here, a receiver in another process."""

    def __init__(self, kind: Kind) -> None:
        keys = JobKeys.new(workers=1, shards=1)
        context = multiprocessing.get_context("spawn")
        self._told, theirs = context.Pipe()
        self._process = context.Process(target=answer, args=(theirs, kind, keys), daemon=True)
        self._process.start()
        self._client = _client(kind, self._told.recv(), keys)
        self._ask()

    def measure(self, size: int, messages: int, trips: int) -> Round:
        """One round of so many messages of `size` bytes."""
        payload = bytes(size)
        receiver_s, sender_s = -self._ask(), -time.process_time()
        began_s = time.perf_counter()
        for _ in range(messages):
            self._send([b"data", payload])
        receiver_s += self._ask()
        took_s = time.perf_counter() - began_s
        sender_s += time.process_time()
        began_s = time.perf_counter()
        for _ in range(trips):
            self._ask(payload)
        trip_s = (time.perf_counter() - began_s) / trips
        total_gb = size * messages / 1e9
        return Round(
            gbit_per_s=total_gb * 8 / took_s,
            trip_us=trip_s * 1e6,
            sender_s=sender_s / total_gb,
            receiver_s=receiver_s / total_gb,
        )

    def _ask(self, payload: bytes = b"") -> float:
        """Wait for an answer; returns the other side's processor time."""
        self._send([b"answer", payload])
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for _, frames in self._client.receive(1.0):
                return float(bytes(frames[0]))
        raise SystemExit("encryption: the other process does not answer")

    def _send(self, frames: Sequence[bytes]) -> None:
        while not self._client.send(0, frames):
            self._client.receive(0.01)

    def close(self) -> None:
        """End the other process."""
        self._told.send("end")
        self._client.close()
        self._process.join(WAIT_S)


def compare(
    sizes: Sequence[int], rounds: int, round_bytes: int = ROUND_BYTES, trips: int = TRIPS
) -> list[list[str]]:
    """Return the table, a row for each size and kind."""
    lines = {kind: Line(kind) for kind in Kind}
    try:
        rows = []
        for size in sizes:
            messages = max(1, min(MOST_MESSAGES, round_bytes // size))
            found: dict[Kind, list[Round]] = {kind: [] for kind in Kind}
            for number in range(rounds):
                for kind in tuple(Kind)[:: 1 if number % 2 else -1]:
                    found[kind].append(lines[kind].measure(size, messages, trips))
            medians = {kind: _median(found[kind]) for kind in Kind}
            rows += [row(size, kind, medians[kind], medians[Kind.CLEAR]) for kind in Kind]
        return rows
    finally:
        for line in lines.values():
            line.close()


def _median(rounds: Sequence[Round]) -> Round:
    return Round(
        gbit_per_s=statistics.median(each.gbit_per_s for each in rounds),
        trip_us=statistics.median(each.trip_us for each in rounds),
        sender_s=statistics.median(each.sender_s for each in rounds),
        receiver_s=statistics.median(each.receiver_s for each in rounds),
    )


def row(size: int, kind: Kind, found: Round, clear: Round) -> list[str]:
    """One size and kind, in words."""
    return [
        f"{size // 1024} KiB",
        kind.value,
        f"{found.gbit_per_s:,.1f}",
        f"{found.gbit_per_s / clear.gbit_per_s:.2f}",
        f"{found.trip_us:,.0f}",
        f"{found.sender_s:.2f}",
        f"{found.receiver_s:.2f}",
    ]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, as Markdown."""
    lines = [HEAD, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    text = [
        "| "
        + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(text)


def _sizes(text: str) -> list[int]:
    sizes = [int(word) for word in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError("sizes are 1 or more")
    return sizes


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="What encryption costs, by size.")
    parser.add_argument("--sizes", type=_sizes, default=list(SIZES), help="bytes, parted by commas")
    parser.add_argument("--rounds", type=int, default=7, help="of each kind, by turns (7)")
    flags = parser.parse_args(arguments)
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:  # both ends as in a job; glibc reads it once
        environment = {**os.environ, **child_environment(threads=1)}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    print(table(compare(flags.sizes, max(1, flags.rounds))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
