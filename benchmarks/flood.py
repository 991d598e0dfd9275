#!/usr/bin/env python3
"""Measure how much a flood of a shard's port slows the iterations of a worker and the shard.

    python benchmarks/flood.py
    python benchmarks/flood.py --seconds 2 --rounds 9 --kinds clear handshakes

Job and flood have a core each. The flooding process alternates: it keeps its core busy without
touching the network, or floods. Kinds: `connections` that send noise and end, `clear` ZeroMQ
sockets without keys, `another key` a handshake with a key that is not the job's, and `handshakes` of a
peer that knows the shard's public key. Each runs against a shard that has closed its port after all
workers connected, as shards do, and against one whose port stays open.

How to read it: one row for each kind and port: milliseconds an iteration at rest and under the
flood (medians over the rounds), the slowdown, and the number of connections that the shard refused.
The goal is at most a tenth with a closed port.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import numpy as np
import zmq

from ps_server import Client, Server, Shard, StoreSpec, TableSpec, ZmqServerTransport
from ps_server.keys import JobKeys, KeyPair, Keyring
from ps_server.network import Network
from ps_server.transport.authenticator import introduce
from ps_server.transport.sealed_ends import ConnectingEnd

ELEMENTS = 1 << 18
STORE = StoreSpec(workers=1, shards=1, tables=(TableSpec(name="w", size=ELEMENTS),))
MOST_OPEN = 200
"""Sockets that a flood has open at a time."""
KINDS = ("connections", "clear", "another key", "handshakes")


class OpenServerTransport(ZmqServerTransport):
    """A port that stays open, for comparison."""

    def admit_no_more(self) -> None:
        """Keep the port open."""


def serve(pipe: Connection, keys: JobKeys, closes: bool) -> None:
    """Run the shard's process: send its address, and at the end the number of refused
    connections.
    """
    pin(0)
    server = Server(
        Shard(0, 1),
        (ZmqServerTransport if closes else OpenServerTransport)(
            "tcp://127.0.0.1:0", keys.of_shard(0)
        ),
    )
    pipe.send(server.address)
    thread = threading.Thread(target=server.serve)
    thread.start()
    pipe.recv()
    pipe.send(server.statistics().refused)
    server.stop()
    thread.join()


def flood(pipe: Connection, address: str, shard_key: str) -> None:
    """Run the flooding process: repeat the last command until another comes."""
    pin(1)
    doing = "rest"
    held: list[Callable[[], None]] = []
    context = zmq.Context()
    # on a busy machine closed sockets wait for ZeroMQ's thread
    context.set(zmq.MAX_SOCKETS, 65_535)
    pipe.send("ready")
    while doing != "end":
        if pipe.poll():
            doing = pipe.recv()
        if doing == "rest":
            sum(range(10_000))
        elif doing == "connections":
            held.append(connect(address))
        else:
            held.append(dial(context, address, shard_key, doing))
        while len(held) > (0 if doing in ("rest", "end") else MOST_OPEN):
            held.pop(0)()
    context.destroy(0)


def connect(address: str) -> Callable[[], None]:
    """Begin a connection that sends noise, if it comes about; returns what ends it."""
    host, _, port = address.removeprefix("tcp://").partition(":")
    connection = socket.socket()
    connection.setblocking(False)
    with contextlib.suppress(OSError):
        connection.connect_ex((host, int(port)))
        connection.send(os.urandom(64))
    return connection.close


def dial(
    context: zmq.Context[zmq.Socket[bytes]], address: str, shard_key: str, kind: str
) -> Callable[[], None]:
    """Begin a ZeroMQ connection that has something to say; returns what ends it."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    if kind != "clear":
        own = KeyPair.new()
        expected = shard_key if kind == "handshakes" else KeyPair.new().public
        introduce(dealer, ConnectingEnd(Keyring(own=own, expect=(expected,)), 0).first)
    dealer.connect(address)
    with contextlib.suppress(zmq.Again):
        dealer.send(b"x" * 1000, zmq.NOBLOCK)
    return dealer.close


def pin(core: int) -> None:
    """Stay on one core, where there are several."""
    os.sched_setaffinity(0, {core % (os.cpu_count() or 1)})


def iterate(client: Client, value: np.ndarray, seconds: float) -> float:
    """Milliseconds an iteration, over so many seconds."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        client.push(0, value, rate=1e-6)
        client.clock()
        client.read(0, value)
        count += 1
    return (time.perf_counter() - began) / count * 1000


def measure(kind: str, *, closes: bool, rounds: int, seconds: float) -> list[str]:
    """One row."""
    keys = JobKeys.new(workers=1, shards=1)
    spawn = multiprocessing.get_context("spawn")
    (serving, at_shard), (flooding, at_flood) = spawn.Pipe(), spawn.Pipe()
    shard = spawn.Process(target=serve, args=(at_shard, keys, closes), daemon=True)
    shard.start()
    address = serving.recv()
    client = Client([address], Network(keys=keys.of_worker(0)), store=STORE)
    value = np.zeros(ELEMENTS, dtype=np.float32)
    client.start(lambda table: [value])
    flooder = spawn.Process(
        target=flood, args=(at_flood, address, keys.shards[0].public), daemon=True
    )
    flooder.start()
    flooding.recv()
    iterate(client, value, 2 * seconds)
    at_rest, flooded = [], []
    for _ in range(rounds):
        for doing, kept in (("rest", at_rest), (kind, flooded)):
            flooding.send(doing)
            iterate(client, value, seconds / 4)
            kept.append(iterate(client, value, seconds))
    flooding.send("end")
    serving.send("how many?")
    refused = serving.recv()
    client.close()
    for process in (flooder, shard):
        process.join(5)
        process.terminate()
    rest_ms, flood_ms = statistics.median(at_rest), statistics.median(flooded)
    slower = statistics.median(f / r for f, r in zip(flooded, at_rest, strict=True)) - 1
    port = "closed" if closes else "open"
    return [
        kind,
        port,
        f"{rest_ms:.2f}",
        f"{flood_ms:.2f}",
        f"{100 * slower:+.1f} %",
        f"{refused:,}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="Measure how much a flood slows a job down.")
    parser.add_argument("--rounds", type=int, default=5, help="at rest and flooded, by turns (5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each (1)")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of floods; default: all"
    )
    parser.add_argument(
        "--open",
        dest="ports",
        action="store_const",
        const=[False],
        default=[True, False],
        help="only ports kept open",
    )
    flags = parser.parse_args(arguments)
    pin(0)
    print("| flood | port | at rest, ms | flooded, ms | slower | refused |", flush=True)
    print("|---|---|---:|---:|---:|---:|", flush=True)
    for closes in flags.ports:
        for kind in flags.kinds:
            row = measure(kind, closes=closes, rounds=max(1, flags.rounds), seconds=flags.seconds)
            print("| " + " | ".join(row) + " |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
