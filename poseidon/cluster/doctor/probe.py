"""The probe of links of `poseidon doctor`: the agent of a host answers its requests.

    {"do": "clock"}                                      its time
    {"do": "mtu", "address": "10.0.0.2"}                 bytes of a packet on its way there
    {"do": "listen", "address": "10.0.0.1", "ports": [9999, 0], "token": "..."}
    {"do": "reach", "address": "10.0.0.2", "ports": [9999, 40123], "token": "...", "timeout_s": 3}
    {"do": "measure", "address": "10.0.0.2", "port": 40123, "token": "...", "seconds": 0.5}
    {"do": "packets", "address": "10.0.0.2", "port": 40124, "token": "...", "sizes": [1500, 576]}

A connection that does not begin with the token is closed. `{"problem": sentence}` answers what
cannot be done.

Law: it leaves no file, no process and no open port.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from poseidon.base.few_visitors import FewVisitors

SILENCE_S = 1800.0
"""How long an accepted connection may say nothing."""
ROUND_TRIPS = 40
SETTLE = 0.2
"""The part of a transfer that does not count: TCP and the links' buffers fill."""
CONNECT_S = 3.0
MOST_STRANGERS = 64
"""Connections at a time whose peers have not shown the token."""
STALL_S = 3.0
"""How long a transfer may carry nothing."""
DATAGRAM_TRIES = 3
DATAGRAM_S = 0.15

_BLOCK = bytes(1 << 18)
_TOKEN_BYTES = 32
_IP_MTU = 14
_IP_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 3
_IPV6_MTU, _IPV6_MTU_DISCOVER, _IPV6_PMTUDISC_PROBE = 24, 23, 3
_HEADERS: dict[int, int] = {socket.AF_INET: 28, socket.AF_INET6: 48}
"""Bytes of the IP and UDP headers of a datagram."""


class Probe:
    """Answers requests; listens for the probes of other hosts."""

    def __init__(self) -> None:
        self._token = b""
        self._sockets: list[socket.socket] = []
        self._visitors: list[FewVisitors] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request; an error becomes `{"problem": sentence}`."""
        asked = {**request, "token": str(request.get("token", "")).encode()}
        do, token = asked.pop("do"), asked.pop("token")
        try:
            if do == "clock":
                return {"time": time.time()}
            if do == "mtu":
                return {"mtu": path_mtu(**asked)}
            if do == "listen":
                return self.listen(**asked, token=token)
            if do == "reach":
                address, ports, limit_s = asked["address"], asked["ports"], asked["timeout_s"]
                return {str(port): reach(address, port, token, limit_s) for port in ports}
            if do == "measure":
                return measure(**asked, token=token)
            return {"arrive": packets_arriving(**asked, token=token)}
        except OSError as error:
            return {"problem": error.strerror or str(error)}

    def listen(self, address: str, ports: list[int], token: bytes) -> dict[str, Any]:
        """Listen for other probes.

        Args:
            address: one of this host's own.
            ports: TCP ports; 0 takes a free one.
            token: what every connection and datagram begins with, `_TOKEN_BYTES` long.

        Returns:
            `tcp`, for each of `ports` the port that listens or, as text, why it cannot; `udp`, a
            port.
        """
        self.close()
        self._token = token
        bound: list[Any] = []
        for port in ports:
            try:
                listener = _bound(address, port, socket.SOCK_STREAM)
                listener.listen(64)
            except OSError as error:
                bound.append(error.strerror or str(error))
                continue
            bound.append(listener.getsockname()[1])
            self._visitors.append(
                FewVisitors(
                    listener,
                    self._serve,
                    name="poseidon-probe",
                    most=MOST_STRANGERS,
                    longest_s=CONNECT_S,
                )
            )
        datagrams = _bound(address, 0, socket.SOCK_DGRAM)
        self._sockets.append(datagrams)
        threading.Thread(target=self._acknowledge, args=(datagrams,), daemon=True).start()
        return {"tcp": bound, "udp": datagrams.getsockname()[1]}

    def close(self) -> None:
        """Stop listening."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # ends an `accept` that waits
            each.close()
        self._sockets.clear()
        for visitors in self._visitors:
            visitors.close()
        self._visitors.clear()

    def _serve(self, connection: socket.socket, keep: Callable[[], None]) -> None:
        """Answer one connection: pings, a transfer to here, a transfer from here, as the other
        side asks.
        """
        with connection, contextlib.suppress(OSError):
            connection.settimeout(CONNECT_S)
            if _exactly(connection, _TOKEN_BYTES) != self._token:
                return
            keep()
            connection.sendall(b"!")
            connection.settimeout(SILENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                order = _exactly(connection, 1)
                if order == b"p":
                    connection.sendall(order)
                elif order == b"s":  # the other side sends
                    (seconds,) = struct.unpack("!d", _exactly(connection, 8))
                    rate = _receive_for(connection, seconds)
                    connection.sendall(struct.pack("!d", rate))
                    return
                elif order == b"r":  # the other side receives
                    (seconds,) = struct.unpack("!d", _exactly(connection, 8))
                    _send_until_closed(connection, seconds)
                    return
                else:
                    return

    def _acknowledge(self, datagrams: socket.socket) -> None:
        while True:
            try:
                content, sender = datagrams.recvfrom(1 << 16)
                if content[:_TOKEN_BYTES] == self._token:
                    datagrams.sendto(struct.pack("!I", len(content)), sender)
            except OSError:
                return


def reach(address: str, port: int, token: bytes, timeout_s: float) -> str:
    """Return whether the probe at a port answers: "open", or a word for what happens instead.

    The words are "refused", "timeout", "unreachable", "other" (something else listens there), or
    the system's sentence.
    """
    try:
        with _connected(address, port, token, timeout_s):
            return "open"
    except TimeoutError:
        return "timeout"
    except ConnectionRefusedError:
        return "refused"
    except ConnectionResetError:
        return "other"
    except OSError as error:
        unreachable = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EPERM, errno.EACCES)
        if error.errno == errno.ETIMEDOUT:
            return "timeout"
        return "unreachable" if error.errno in unreachable else (error.strerror or str(error))


def measure(address: str, port: int, token: bytes, seconds: float) -> dict[str, Any]:
    """Measure the link to another probe.

    Args:
        address, port: where it listens.
        token: of this examination.
        seconds: of a transfer, one in each direction.

    Returns:
        `rtt_s`, the median round trip of one byte; `send` and `receive`, bytes a second, None where
        the transfer stalls.
    """
    result: dict[str, Any] = {}
    with _connected(address, port, token, CONNECT_S) as link:
        trips = []
        for _ in range(ROUND_TRIPS):
            start = time.perf_counter()
            link.sendall(b"p")
            _exactly(link, 1)
            trips.append(time.perf_counter() - start)
        result["rtt_s"] = statistics.median(trips)
        result["send"] = _send_and_ask(link, seconds)
    with _connected(address, port, token, CONNECT_S) as link:
        link.sendall(b"r" + struct.pack("!d", seconds))
        try:
            result["receive"] = _receive_for(link, seconds)
        except OSError:
            result["receive"] = None
        _reset_on_close(link)
    return result


def packets_arriving(address: str, port: int, token: bytes, sizes: list[int]) -> list[int]:
    """Return the sizes of which an unfragmented packet arrives at another probe, and its answer
    here.

    Args:
        sizes: bytes with the IP and UDP headers, each larger than those and the token.
    """
    family, where = _resolve(address, port, socket.SOCK_DGRAM)
    arrived: set[int] = set()
    with socket.socket(family, socket.SOCK_DGRAM) as sender:
        if family == socket.AF_INET:
            sender.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE)
        else:
            sender.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _IPV6_PMTUDISC_PROBE)
        sender.connect(where)
        for attempt in range(DATAGRAM_TRIES):
            for size in set(sizes) - arrived:
                with contextlib.suppress(OSError):  # larger than the interface takes
                    sender.send(token.ljust(size - _HEADERS[family], b"\0"))
            end = time.monotonic() + DATAGRAM_S * 2**attempt
            while set(sizes) - arrived and (left := end - time.monotonic()) > 0:
                sender.settimeout(left)
                with contextlib.suppress(OSError, struct.error):  # nothing came, or a stranger's
                    arrived.add(struct.unpack("!I", sender.recv(4))[0] + _HEADERS[family])
    return sorted(arrived & set(sizes))


def path_mtu(address: str) -> int | None:
    """Return the bytes of a packet on this host's way to an address; None where the system does
    not say.
    """
    try:
        family, where = _resolve(address, 9, socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as there:
            there.connect(where)
            if family == socket.AF_INET:
                return there.getsockopt(socket.IPPROTO_IP, _IP_MTU)
            return there.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
    except OSError:
        return None


def _exactly(link: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        piece = link.recv(count - len(content))
        if not piece:
            raise ConnectionResetError("the other end has closed the connection")
        content += piece
    return content


@contextlib.contextmanager
def _connected(address: str, port: int, token: bytes, timeout_s: float) -> Any:
    link = socket.create_connection((address, port), timeout=timeout_s)
    with link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(token)
        if _exactly(link, 1) != b"!":
            raise ConnectionResetError("what listens there is not a probe")
        link.settimeout(STALL_S)
        yield link


def _send_and_ask(link: socket.socket, seconds: float) -> float | None:
    """Send until the other side has measured; return its rate, None when the transfer stalls."""
    link.sendall(b"s" + struct.pack("!d", seconds))
    stop = threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):
            while not stop.is_set():
                link.sendall(_BLOCK)

    link.settimeout(seconds + 2 * STALL_S)
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        return float(struct.unpack("!d", _exactly(link, 8))[0]) or None
    except OSError:
        return None
    finally:
        stop.set()
        _reset_on_close(link)
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        sender.join()


def _send_until_closed(link: socket.socket, seconds: float) -> None:
    link.settimeout(seconds + 2 * STALL_S)
    end = time.monotonic() + seconds + 2 * STALL_S
    while time.monotonic() < end:
        link.sendall(_BLOCK)


def _receive_for(link: socket.socket, seconds: float) -> float:
    """Receive for a time; return bytes a second after the first fifth, 0 when nothing comes."""
    buffer = bytearray(1 << 20)
    link.settimeout(STALL_S)
    start = time.perf_counter()
    counted_from, received, now = 0.0, 0, start
    while now < start + seconds or not received:
        try:
            count = link.recv_into(buffer)
        except TimeoutError:
            break
        if not count:
            break
        now = time.perf_counter()
        if counted_from:
            received += count
        elif now >= start + SETTLE * seconds:
            counted_from = now
    return received / (now - counted_from) if received and now > counted_from else 0.0


def _reset_on_close(link: socket.socket) -> None:
    """Drop what is still to be sent when the socket is closed."""
    with contextlib.suppress(OSError):
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _resolve(address: str, port: int, kind: int) -> tuple[int, Any]:
    family, _, _, _, where = socket.getaddrinfo(address, port, type=kind)[0]
    return family, where


def _bound(address: str, port: int, kind: int) -> socket.socket:
    family, where = _resolve(address, port, kind)
    made = socket.socket(family, kind)
    try:
        if kind == socket.SOCK_STREAM:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
    except OSError:
        made.close()
        raise
    return made
