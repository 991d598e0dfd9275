"""The server of the dashboard."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn

from poseidon.errors import JobError
from poseidon.observe.dashboard.app import make_app

END_S = 3.0
"""From a signal to the end of the process, whatever a request waits for."""
STOPS = (signal.SIGINT, signal.SIGTERM)


def serve(folders: list[Path], *, host: str, port: int, token: str) -> int:
    """Serve the page of jobs until Ctrl-C or SIGTERM; return the exit code.

    Args:
        folders: of jobs, or folders that hold some.
        host: the address to listen at.
        port: 0 takes a free one.
        token: that each request needs; empty: none.

    Raises:
        JobError: the address cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:  # the latter: such as a..b
        # socket.create_server repeats the address.
        why = (getattr(error, "strerror", None) or str(error)).partition(" (while")[0]
        nowhere = isinstance(error, socket.gaierror | UnicodeError)
        elsewhere = nowhere or getattr(error, "errno", 0) == errno.EADDRNOTAVAIL
        hint = (
            "expected an address of this machine"
            if elsewhere
            else "choose a different --port, or 0 for a free one"
        )
        raise JobError(f"cannot listen at {host}:{port}: {why}; {hint}") from error
    with listener:
        address = page_address(host, listener.getsockname()[1])
        print(f"dashboard at {address}{f'?token={token}' if token else ''}", flush=True)
        if token:
            print(
                "the connection is not encrypted: use it in a network that you trust, or forward "
                "the port over SSH",
                file=sys.stderr,
            )
        # Requests that are not HTTP would be warnings: with --host anyone could write lines to this
        # terminal.
        config = uvicorn.Config(
            make_app(folders, token=token),
            log_level="error",
            timeout_graceful_shutdown=1,
            lifespan="off",
        )
        server = _Server(config)
        server.run(sockets=[listener])
        server.ended.set()
    return 0


class _Server(uvicorn.Server):
    """A server that returns after SIGINT or SIGTERM. uvicorn's own raises the signal again,
    which ends the process. It ends the process where a thread that reads files does not return, as
    from a network's file system.

    Attributes:
        ended: set by the owner when `run` has returned.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = threading.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        threading.Thread(target=self._end_late, name="poseidon-page-end", daemon=True).start()

    def _end_late(self) -> None:
        if not self.ended.wait(END_S):
            os._exit(0)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        before = {number: signal.signal(number, self.handle_exit) for number in STOPS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def page_address(host: str, port: int) -> str:
    """Return the address of the page for a browser; one that stands for all addresses becomes
    this machine's name.
    """
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{name}]:{port}/" if ":" in name else f"http://{name}:{port}/"
