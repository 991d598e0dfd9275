"""Streams of chunks and all-reduces between the hosts of a testbed: their processor time, and
the goodput of links.

All hosts of a testbed share one machine. While each sends to the next one at full rate, its
processors are sometimes late, and links are idle at times. Needs root.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

from benchmarks.simulation.background_load import busy_cores
from benchmarks.simulation.ring_probe import BUCKET_BYTES
from benchmarks.simulation.wire_probe import CHUNK_BYTES
from benchmarks.testbed.errors import TestbedError
from benchmarks.testbed.hosts import Host, Hosts
from benchmarks.testbed.processes import Processes

PORT = 9900
LIMIT_S = 60.0
MESSAGES = 300
RING_HOSTS, ALL_REDUCES = 4, 20
STREAM_S = 2.0
"""Duration of the streams that fill links."""
TRIES = 3

Outputs = list[dict[str, float]]
Command = tuple[str, Host, Sequence[str]]
"""A name, the host, and the arguments after `python -m benchmarks.simulation.`"""


def cpu_s_per_byte() -> float:
    """Return a core's mean time to send or to receive a byte, on links without a rate."""
    return sum(output["cpu_s"] for output in _streams(2, None, MESSAGES)) / (
        2 * 2 * MESSAGES * CHUNK_BYTES
    )


def ring_cpu_s_per_byte() -> float:
    """Return a core's mean time to send a byte round a ring, receive one and add it, on links
    without a rate.
    """
    with Hosts(RING_HOSTS) as hosts:
        rendezvous = f"tcp://{hosts[0].address}:{PORT}"
        commands = [
            (
                f"ring {rank}",
                host,
                ("ring_probe", rendezvous, str(rank), str(RING_HOSTS), str(ALL_REDUCES)),
            )
            for rank, host in enumerate(hosts)
        ]
        used_s = statistics.fmean(output["cpu_s"] for output in _run(commands))
    return used_s / (ALL_REDUCES * BUCKET_BYTES * 2 * (RING_HOSTS - 1) / RING_HOSTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The links while every host sends to the next one and receives from the one before.

    Attributes:
        goodput: the part of their rate that they carry: the median over some runs of the mean over
            all hosts, at most 1.
        busy_goodput: the same while every core has other work.
        interrupts_s_per_byte: a core's time in interrupts for a byte that leaves or reaches a host.
    """

    goodput: float
    busy_goodput: float
    interrupts_s_per_byte: float


NO_LIMIT = Carried(goodput=1.0, busy_goodput=1.0, interrupts_s_per_byte=0.0)
"""Links without a rate."""


@lru_cache
def carried(hosts: int, rate_mbit: float) -> Carried:
    """Measure links.

    Args:
        hosts: number of hosts.
        rate_mbit: of each link in each direction, Mbit/s.

    Raises:
        TestbedError: no hosts can be made here.
    """
    count = math.ceil(rate_mbit * 1e6 / 8 * STREAM_S / CHUNK_BYTES) + 1
    least_s = (count - 1) * CHUNK_BYTES * 8 / (rate_mbit * 1e6)
    before_s = _interrupts_s()
    idle_s = _stream_s(hosts, rate_mbit, count)
    used_s = _interrupts_s() - before_s
    with busy_cores():
        busy_s = _stream_s(hosts, rate_mbit, count)
    return Carried(
        goodput=min(1.0, least_s / idle_s),
        busy_goodput=min(1.0, least_s / max(idle_s, busy_s)),
        interrupts_s_per_byte=used_s / (2 * TRIES * hosts * count * CHUNK_BYTES),
    )


def _interrupts_s() -> float:
    """Return the seconds that all processors have spent on interrupts and their work."""
    times = psutil.cpu_times()
    return float(times.irq + times.softirq)


def _stream_s(hosts: int, rate_mbit: float, count: int) -> float:
    """Return the duration of a stream at its receivers: the median over some runs of the mean
    over all hosts.
    """
    tries = (_streams(hosts, rate_mbit, count)[:hosts] for _ in range(TRIES))
    return statistics.median(
        statistics.fmean(output["seconds"] for output in receivers) for receivers in tries
    )


def _streams(count: int, rate_mbit: float | None, messages: int) -> Outputs:
    """Return the output of each host's receiver, then of each host's sender."""
    with Hosts(count, rate_mbit=rate_mbit) as hosts:
        commands = [
            (
                f"{role} {index}",
                hosts[index],
                (
                    "wire_probe",
                    role,
                    f"tcp://{hosts[(index + shift) % count].address}:{PORT}",
                    str(messages),
                ),
            )
            for role, shift in (("receive", 0), ("send", 1))
            for index in range(count)
        ]
        return _run(commands)


def _run(commands: Sequence[Command]) -> Outputs:
    """Run some probes; return the last output of each, in their order."""
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        for name, host, (module, *arguments) in commands:
            argv = (sys.executable, "-m", f"benchmarks.simulation.{module}", *arguments)
            processes.start(name, argv, host=host)
        processes.await_end(LIMIT_S)
        processes.check()
        return [_last_output(name, processes.output(name)) for name, _, _ in commands]


def _last_output(name: str, lines: list[str]) -> dict[str, float]:
    if not lines:
        raise TestbedError(f"the probe '{name}' of the links printed nothing within {LIMIT_S:g} s")
    output: dict[str, float] = json.loads(lines[-1])
    return output
