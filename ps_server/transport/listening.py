"""The socket that a shard or a worker listens on, made here rather than by ZeroMQ, so that it
can be shut again.

Law: it is bound to the one address that is given. Once all peers are connected, `shut` makes the
kernel drop every further attempt to connect without waking the process, so such attempts cost the
job nothing. Open connections are not touched by it.

ZeroMQ accepts connections on its own thread and names their descriptors, which it closes when it
likes. `Borrowed` therefore looks at a duplicate, and acts only if that is still the same connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
import termios
from collections.abc import Iterator

from ps_server.errors import TransportError

BACKLOG = 128
SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27
"""Linux's numbers; Python has no names for them."""
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""One instruction of the kernel's packet filter: accept 0 bytes of every packet."""

_RECEIVED_AT = 128
"""Where Linux's struct tcp_info has the bytes that were received, a number of 64 bits."""
Place = tuple[str | int, ...]
"""Address and port of a peer, as `getpeername` returns them; empty: it has gone."""


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
        self.is_shut = False
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

    @property
    def family(self) -> socket.AddressFamily:
        """Of the address."""
        return self._socket.family

    def descriptor(self) -> int:
        """Return another descriptor of the socket; who asks for it closes it."""
        return os.dup(self._socket.fileno())

    def shut(self) -> None:
        """Drop further attempts to connect. Does nothing where the kernel has no filters."""
        self.is_shut = True
        program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        with contextlib.suppress(OSError):
            self._socket.setsockopt(
                socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program))
            )

    def reopen(self) -> None:
        """Take attempts to connect again."""
        self.is_shut = False
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)

    def close(self) -> None:
        """Let go of the address."""
        self._socket.close()


class Borrowed:
    """Looks at connections of a listening socket that ZeroMQ owns.

    It opens no file later: each duplicate takes the place of the one before.

    Args:
        listening: their socket.
    """

    def __init__(self, listening: Listening) -> None:
        self._rest = listening.descriptor()
        self._socket = socket.socket(
            listening.family, socket.SOCK_STREAM, 0, fileno=listening.descriptor()
        )

    def place(self, descriptor: int) -> Place:
        """Return where a connection's peer is."""
        with self._lent(descriptor):
            return self._place()

    def received_bytes(self, descriptor: int, place: Place) -> int:
        """Return how much of what a peer has sent ZeroMQ has read; 0: the peer has gone."""
        with self._lent(descriptor):
            if not place or self._place() != place:
                return 0
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
            unread = fcntl.ioctl(self._socket, termios.FIONREAD, bytes(4))
        received = int.from_bytes(info[_RECEIVED_AT:], sys.byteorder)
        return max(0, received - int.from_bytes(unread, sys.byteorder))

    def end(self, descriptor: int, place: Place) -> None:
        """End a connection: ZeroMQ sees that its peer has left."""
        with self._lent(descriptor):
            if place and self._place() == place:
                with contextlib.suppress(OSError):  # it leaves by itself
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the files."""
        self._socket.close()
        os.close(self._rest)

    def _place(self) -> Place:
        try:
            return tuple(self._socket.getpeername())
        except OSError:
            return ()

    @contextlib.contextmanager
    def _lent(self, descriptor: int) -> Iterator[None]:
        """Make the socket a duplicate of a connection; where that is closed it has no peer."""
        with contextlib.suppress(OSError):
            os.dup2(descriptor, self._socket.fileno(), inheritable=False)
        try:
            yield
        finally:
            os.dup2(self._rest, self._socket.fileno(), inheritable=False)


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
