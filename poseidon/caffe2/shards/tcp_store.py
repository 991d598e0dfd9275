"""A store in the memory of one shard, which the others reach by TCP.

    store = TcpStore("10.0.0.1", 29500, "run_17", serve=shard == 0)

A request is one line of JSON on a connection of its own, and so is the answer.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from poseidon.base.few_visitors import FewVisitors
from poseidon.caffe2.shards.stores import LAST_POLL_S, TIMEOUT_S, KeyTaken, Store
from poseidon.errors import JobError

LONGEST = 16 * 2**20
"""Bytes of a request or an answer, at most."""
ANSWER_S = 10.0
"""Longest time that an answer takes."""
MOST = 128
"""Requests at a time."""


class _Server:
    """Keeps keys and counters, and answers requests, each on a thread.

    Args:
        listener: owned from here on.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.values: dict[str, str] = {}
        self.counters: Counter[str] = Counter()
        self.lock = threading.Lock()
        self._visitors = FewVisitors(
            listener, self._serve, name="caffe2-store", most=MOST, longest_s=ANSWER_S
        )

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request: `set`, `find` or `add`."""
        key = str(request["key"])
        with self.lock:
            if request["kind"] == "add":
                self.counters[key] += int(request["value"])
                return {"value": self.counters[key]}
            known = self.values.get(key)
            if request["kind"] == "set" and known is None:
                self.values[key] = str(request["value"])
            return {"value": known}

    def _serve(self, connection: socket.socket, _: Callable[[], None]) -> None:
        """Read a line, and write one; drop anything else."""
        with (
            contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError),
            connection.makefile("rb") as requests,
        ):
            answer = self.answer(json.loads(requests.readline(LONGEST)))
            connection.sendall(json.dumps(answer).encode() + b"\n")

    def close(self) -> None:
        """Answer no more."""
        self._visitors.close()


class TcpStore(Store):
    """Keys in the memory of one shard.

    Args:
        host: of the shard that serves.
        port: of that shard; 0 where this process serves: a free one.
        prefix: of the run; keys of other prefixes are apart.
        serve: whether this process serves, until the store is not used any more.
        timeout_s: longest time to wait for the shard that serves.

    Raises:
        JobError: the port cannot be opened, or the shard that serves is not there in time.
    """

    def __init__(
        self,
        host: str,
        port: int,
        prefix: str = "",
        *,
        serve: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._host, self._port, self._prefix = host, port, prefix
        if serve:
            self._serve()
        else:
            self._await_server(timeout_s)

    @property
    def port(self) -> int:
        """The port of the shard that serves."""
        return self._port

    def _serve(self) -> None:
        try:
            family, *_, address = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM
            )[0]
            listener = socket.create_server(address[:2], family=family, backlog=MOST)
        except OSError as error:
            raise JobError(
                f"cannot serve the rendezvous at {self._host}:{self._port}: "
                f"{error.strerror or error}"
            ) from error
        self._port = int(listener.getsockname()[1])
        weakref.finalize(self, _stop, _Server(listener))

    def _await_server(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                socket.create_connection((self._host, self._port), ANSWER_S).close()
                return
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise JobError(
                        f"the rendezvous at {self._host}:{self._port} cannot be reached within "
                        f"{timeout_s:g} s ({error.strerror or error}); check the host, the port, "
                        "and that shard 0 runs there"
                    ) from error
            time.sleep(LAST_POLL_S)

    def set(self, key: str, value: bytes) -> None:
        known = self._request("set", key, base64.b64encode(value).decode())
        if known is not None:
            raise KeyTaken(key, base64.b64decode(known))

    def find(self, key: str) -> bytes | None:
        known = self._request("find", key)
        return None if known is None else base64.b64decode(known)

    def add(self, key: str, value: int) -> int:
        return int(self._request("add", key, value))

    def _request(self, kind: str, key: str, value: Any = None) -> Any:
        line = (
            json.dumps({"kind": kind, "key": f"{self._prefix}/{key}", "value": value}).encode()
            + b"\n"
        )
        try:
            with (
                socket.create_connection((self._host, self._port), ANSWER_S) as connection,
                connection.makefile("rb") as answers,
            ):
                connection.sendall(line)
                return json.loads(answers.readline(LONGEST))["value"]
        except (OSError, ValueError) as error:
            raise JobError(f"the rendezvous at {self._host}:{self._port} ended: {error}") from error


def _stop(server: _Server) -> None:
    threading.Thread(target=server.close, daemon=True).start()
