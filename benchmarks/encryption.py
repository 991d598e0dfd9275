#!/usr/bin/env python3
"""Measure the cost of CURVE: messages between two processes of this machine, in clear and
encrypted by turns.

    python benchmarks/encryption.py
    python benchmarks/encryption.py --sizes 1024,2097152 --rounds 9

How to read it: one row a size. `MB/s` is one sender and one receiver, `round trip` one message
there and a short answer back, `CPU` the processor time of both ends for a gigabyte; medians over
the rounds, which alternate. `of clear` is the encrypted throughput as a part of the other; `hides
up to` the rate of a link, Gbit/s, that one sender still fills. Over loopback nothing else is in the
way, so this is the worst case: a slower link leaves the processor time to the arithmetic.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.checkout import use_environment

use_environment()

from ps_server.keys import JobKeys
from ps_server.transport.zmq_sockets import ZmqClientTransport, ZmqServerTransport

SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 21, 1 << 23)
ROUND_BYTES = 64 << 20
MOST_MESSAGES = 4_000
TRIPS = 50
WAIT_S = 30.0
HEAD = (
    "size",
    "clear MB/s",
    "CURVE MB/s",
    "of clear",
    "hides up to",
    "clear trip us",
    "CURVE trip us",
    "clear CPU s/GB",
    "CURVE CPU s/GB",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round has measured.

    Attributes:
        mb_per_s: throughput, millions of bytes a second.
        trip_us: of one message and its answer.
        cpu_s_per_gb: processor time of both ends.
    """

    mb_per_s: float
    trip_us: float
    cpu_s_per_gb: float


def answer(pipe: Connection, keys: JobKeys | None) -> None:
    """Run the receiving process: send its address, then answer each message whose first frame
    asks for it.
    """
    transport = ZmqServerTransport("tcp://127.0.0.1:0", keys.of_shard(0) if keys else None)
    pipe.send(transport.address)
    try:
        while not pipe.poll():
            for peer, frames in transport.receive(0.2):
                if bytes(frames[0]) == b"answer":
                    while not transport.send(peer, [b"%f" % time.process_time()]):
                        transport.receive(0.01)
    finally:
        transport.close()


class Line:
    """A sender here, a receiver in another process.

    Args:
        keys: None: in clear.
    """

    def __init__(self, keys: JobKeys | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._told, theirs = context.Pipe()
        self._process = context.Process(target=answer, args=(theirs, keys), daemon=True)
        self._process.start()
        self._client = ZmqClientTransport([self._told.recv()], keys.of_worker(0) if keys else None)
        self._ask()

    def measure(self, size: int, messages: int, trips: int) -> Round:
        """One round of so many messages of `size` bytes."""
        payload = bytes(size)
        cpu_s = -self._ask() - time.process_time()
        began_s = time.perf_counter()
        for _ in range(messages):
            self._send([b"data", payload])
        there_s = self._ask()
        took_s = time.perf_counter() - began_s
        cpu_s += there_s + time.process_time()
        began_s = time.perf_counter()
        for _ in range(trips):
            self._ask(payload)
        trip_s = (time.perf_counter() - began_s) / trips
        total = size * messages
        return Round(
            mb_per_s=total / took_s / 1e6, trip_us=trip_s * 1e6, cpu_s_per_gb=cpu_s / total * 1e9
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
    """Return the table, a row for each size."""
    lines = [Line(None), Line(JobKeys.new(workers=1, shards=1))]
    try:
        rows = []
        for size in sizes:
            messages = max(1, min(MOST_MESSAGES, round_bytes // size))
            found: list[list[Round]] = [[], []]
            for number in range(rounds):
                for which in (0, 1) if number % 2 else (1, 0):
                    found[which].append(lines[which].measure(size, messages, trips))
            rows.append(row(size, *(_median(each) for each in found)))
        return rows
    finally:
        for line in lines:
            line.close()


def _median(rounds: Sequence[Round]) -> Round:
    return Round(
        mb_per_s=statistics.median(each.mb_per_s for each in rounds),
        trip_us=statistics.median(each.trip_us for each in rounds),
        cpu_s_per_gb=statistics.median(each.cpu_s_per_gb for each in rounds),
    )


def row(size: int, clear: Round, curve: Round) -> list[str]:
    """One size, in words."""
    return [
        f"{size // 1024} KiB",
        f"{clear.mb_per_s:,.0f}",
        f"{curve.mb_per_s:,.0f}",
        f"{curve.mb_per_s / clear.mb_per_s:.2f}",
        f"{curve.mb_per_s * 8e-3:.1f} Gbit/s",
        f"{clear.trip_us:,.0f}",
        f"{curve.trip_us:,.0f}",
        f"{clear.cpu_s_per_gb:.2f}",
        f"{curve.cpu_s_per_gb:.2f}",
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
    parser = argparse.ArgumentParser(description="What CURVE costs by the size of a message.")
    parser.add_argument("--sizes", type=_sizes, default=list(SIZES), help="bytes, parted by commas")
    parser.add_argument("--rounds", type=int, default=7, help="of each kind, by turns (7)")
    flags = parser.parse_args(arguments)
    print(table(compare(flags.sizes, max(1, flags.rounds))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
