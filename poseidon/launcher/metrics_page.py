"""The page of `--metrics_port`: gauges in Prometheus's text format, over HTTP on loopback.

The format: https://prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4.

Law: one request a connection, a few connections at a time (`poseidon.base.few_visitors`), each short. A
request must name loopback as its host, so that pages of other sites cannot read anything.
"""

from __future__ import annotations

import math
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from poseidon.base.few_visitors import FewVisitors
from poseidon.cluster.machinefile import names_loopback

LONGEST_REQUEST_BYTES = 8192
TEXT = "text/plain; version=0.0.4; charset=utf-8"
PATHS = ("/", "/metrics")
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class Gauge:
    """A value for each combination of labels."""

    name: str
    text: str
    labels: tuple[str, ...]
    values: dict[tuple[str, ...], float] = field(default_factory=dict)

    def set(self, value: float, *labels: str) -> None:
        """Set the value of these labels, in the order of their names."""
        self.values[labels] = float(value)

    def lines(self) -> list[str]:
        """Return the gauge as Prometheus reads it."""
        lines = [f"# HELP {self.name} {self.text}", f"# TYPE {self.name} gauge"]
        for labels, value in list(self.values.items()):
            named = sorted(zip(self.labels, labels, strict=True))
            inside = ",".join(f'{name}="{label.translate(_ESCAPES)}"' for name, label in named)
            lines.append(f"{self.name}{{{inside}}} {_number(value)}")
        return lines


class MetricsPage:
    """Serves gauges.

    Args:
        port: on loopback, 0 for a free one.

    Raises:
        OSError: the port cannot be used.
    """

    def __init__(self, port: int) -> None:
        listener = socket.create_server(("127.0.0.1", port), backlog=16)
        self.port = int(listener.getsockname()[1])
        self._gauges: list[Gauge] = []
        self._lock = threading.Lock()
        self._visitors = FewVisitors(listener, self._serve, name="poseidon-metrics")

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Return a new gauge."""
        gauge = Gauge(name, text, labels)
        with self._lock:
            self._gauges.append(gauge)
        return gauge

    def close(self) -> None:
        """Serve no more."""
        self._visitors.close()

    def _serve(self, connection: socket.socket, _: Callable[[], None]) -> None:
        request = b""
        while b"\r\n\r\n" not in request and b"\n\n" not in request:
            more = connection.recv(LONGEST_REQUEST_BYTES)
            request += more
            if not more or len(request) > LONGEST_REQUEST_BYTES:
                return
        connection.sendall(self._answer(request.decode("latin-1")))
        connection.shutdown(socket.SHUT_WR)

    def _answer(self, request: str) -> bytes:
        method, path = (*request.partition("\n")[0].split(" "), "", "")[:2]
        host = re.search(r"^host:[ \t]*([^\r\n]*)", request, re.MULTILINE | re.IGNORECASE)
        if not names_loopback(host[1].strip() if host else ""):
            return _response(
                "403 Forbidden", "expected localhost, 127.0.0.1 or [::1] as the Host\n"
            )
        if method != "GET":
            return _response("405 Method Not Allowed", "expected GET\n")
        if path.partition("?")[0] not in PATHS:
            return _response("404 Not Found", "expected /metrics\n")
        with self._lock:
            lines = [line for gauge in self._gauges for line in gauge.lines()]
        return _response("200 OK", "".join(f"{line}\n" for line in lines))


def _response(status: str, text: str) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {TEXT}\r\nContent-Length: {len(body)}\r\n"
        "X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")
