"""The socket that a shard or a worker listens on, made here rather than by ZeroMQ, so that it
can be shut again.

Law: it is bound to the one address that is given. Once all peers are connected, `shut` makes the
kernel drop every further attempt to connect without waking the process, so such attempts cost the
job nothing. Open connections are not touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct

from ps_server.errors import TransportError

BACKLOG = 128
SO_ATTACH_FILTER = 26
"""Linux's number; Python has no name for it."""
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""One instruction of the kernel's packet filter: accept 0 bytes of every packet."""


class Listening:
    """A listening TCP socket.

    Args:
        address: `tcp://host:port`; an IPv6 address in brackets; host `*` is every interface; port 0
            takes a free one.
        send_buffer_bytes: what the kernel holds for each connection.

    Raises:
        TransportError: it cannot be bound, with the reason (in use, no such interface, ...).
    """

    def __init__(self, address: str, *, send_buffer_bytes: int) -> None:
        host, port = _host_and_port(address)
        try:
            family, kind, protocol, _, target = socket.getaddrinfo(
                None if host == "*" else host,
                port,
                type=socket.SOCK_STREAM,
                flags=socket.AI_PASSIVE,
            )[0]
            self._socket = socket.socket(family, kind, protocol)
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
                self._socket.bind(target)
                self._socket.listen(BACKLOG)
                self._socket.setblocking(False)
            except OSError:
                self._socket.close()
                raise
        except (OSError, OverflowError, UnicodeError) as error:
            raise TransportError(
                f"cannot listen on {address}: {getattr(error, 'strerror', None) or error}"
            ) from error

    @property
    def address(self) -> str:
        """Where clients connect to, with the real port."""
        host, port, *_ = self._socket.getsockname()
        return (
            f"tcp://[{host}]:{port}"
            if self._socket.family == socket.AF_INET6
            else f"tcp://{host}:{port}"
        )

    def descriptor(self) -> int:
        """Return a descriptor of the socket for ZeroMQ, which closes it."""
        return os.dup(self._socket.fileno())

    def shut(self) -> None:
        """Drop every further attempt to connect. Does nothing where the kernel has no filters."""
        program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        with contextlib.suppress(OSError):
            self._socket.setsockopt(
                socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program))
            )

    def close(self) -> None:
        """Let go of the address."""
        self._socket.close()


def _host_and_port(address: str) -> tuple[str, int]:
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if (
        scheme != "tcp"
        or not host
        or not (port.isdecimal() and port.isascii())
        or int(port) > 65_535
    ):
        raise TransportError(f"cannot listen on {address}: expected tcp://host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
