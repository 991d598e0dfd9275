"""How long this process's TCP connections have had something to send, by the address of the
other side.

Linux counts for each connection the time in which sent bytes were not acknowledged yet, or waited
to be sent (`tcpi_busy_time` of TCP_INFO). A connection over a link that is fast enough is busy for
a small part of the time; over one that is the limit, nearly all of it. The time in which the other
side's process did not read what had come (`tcpi_rwnd_limited`) is left out: the link does not cause
it.

Law: reading changes nothing. Elsewhere than on Linux, or with an old kernel, there is nothing to
report.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress

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
