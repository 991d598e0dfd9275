"""The statistics of a client and of a shard: what `Client.statistics` and `Server.statistics`
return.

Law: all numbers count from the start of the process and only grow, except the momentary values
(`queue`, `memory_bytes`); the numbers of an interval are the difference of two reports.

How long this process's TCP connections have had something to send. Linux counts for each connection
the time in which sent bytes were not acknowledged yet, or waited to be sent (`tcpi_busy_time` of
TCP_INFO). A connection over a link that is fast enough is busy for a small part of the time; over one
that is the limit, nearly all of it. The time in which the other side's process did not read what had
come (`tcpi_rwnd_limited`) is left out: the link does not cause it. Elsewhere than on Linux, or with an
old kernel, there is nothing to report.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStatistics:
    """One table, as seen by one client.

    Attributes:
        name: the table's.
        bytes_out: of its pushes, message heads included.
        bytes_in: of the values that follow from them, message heads included.
        waited_s: how long reads of it have blocked.
        hidden_s: how long its gradients and values were on their way while no read waited for them:
            from a push to the arrival of the last piece of the value that follows from it, less
            what `waited_s` has of that time.
    """

    name: str
    bytes_out: int = 0
    bytes_in: int = 0
    waited_s: float = 0.0
    hidden_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStatistics:
    """One worker's connection to the store.

    Attributes:
        iterations: its clock, less the clock it started with.
        tables: by table id.
        other_bytes_out: of messages that belong to no table's iterations: joining, first values,
            clocks, collections, snapshots.
        other_bytes_in: likewise.
        row_tables: by number: bytes of pushes and requests, and of the rows that came; no times.
    """

    iterations: int
    tables: Sequence[TableStatistics]
    other_bytes_out: int = 0
    other_bytes_in: int = 0
    row_tables: Sequence[TableStatistics] = ()


@dataclass(slots=True, kw_only=True)
class ShardStatistics:
    """One shard; its meter counts in one of these.

    Attributes:
        bytes_in: payload received.
        bytes_out: payload sent.
        messages_in: messages received.
        messages_out: messages sent.
        queue: packets received and not handled yet, at this moment.
        longest_queue: the most there have been.
        updates: chunks that have a new value.
        busy_s: time not spent waiting for messages.
        memory_bytes: of the chunks with their histories, at this moment.
        peak_bytes: the most memory that the process has held.
        refused: connections that were not authenticated.
        dropped: messages that were not legal, and changed nothing.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    messages_in: int = 0
    messages_out: int = 0
    queue: int = 0
    longest_queue: int = 0
    updates: int = 0
    busy_s: float = 0.0
    memory_bytes: int = 0
    peak_bytes: int = 0
    refused: int = 0
    dropped: int = 0


_BUSY_OFFSET = 168
"""Of `tcpi_busy_time` and then `tcpi_rwnd_limited`, microseconds, in `struct tcp_info` since
Linux 4.10.
"""
_INFO_BYTES = 232


def sending_s() -> Mapping[str, float]:
    """Return the seconds of all open connections, by the numeric address of the other side;
    loopback is left out.
    """
    found: dict[str, float] = {}
    for peer, busy_s in _connections():
        if not (peer.startswith("127.") or peer == "::1"):
            found[peer] = round(found.get(peer, 0.0) + busy_s, 3)
    return found


def _connections() -> Iterator[tuple[str, float]]:
    with suppress(OSError):  # no /proc
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed since, not TCP, or not connected
                number = int(name)
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    yield _busy(number)


def _busy(number: int) -> tuple[str, float]:
    with socket.socket(fileno=os.dup(number)) as copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
            raise OSError("no TCP connection")
        info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if len(info) < _BUSY_OFFSET + 16:
            raise OSError("an old kernel")
        busy_us, unread_us = struct.unpack_from("=QQ", info, _BUSY_OFFSET)
        address = str(copy.getpeername()[0])
        return address.removeprefix("::ffff:"), (busy_us - unread_us) / 1e6
