"""A real Redis server on a free port, for the time of a test."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.free_ports import free_ports
from tests.support.needs import require
from tests.support.polling import until


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A server that runs.

    Args:
        port: of 127.0.0.1.
        password: that it wants; empty: none.
    """

    port: int
    password: str = ""

    def call(self, *words: str) -> str:
        """Run one command of redis-cli, and return what it prints."""
        auth = ["-a", self.password, "--no-auth-warning"] if self.password else []
        done = subprocess.run(
            ["redis-cli", "-p", str(self.port), *auth, *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=30,
        )
        return done.stdout.strip()

    def become_replica(self) -> None:
        """Let it follow a server that does not exist: it takes no writes any more."""
        assert self.call("replicaof", "127.0.0.1", "1") == "OK"


@contextlib.contextmanager
def redis_server(
    folder: Path, *, password: str = "", host: str = "127.0.0.1"
) -> Iterator[RedisServer]:
    """Run a server that keeps nothing on disk."""
    require("redis")
    (port,) = free_ports(1)
    command = [
        "redis-server",
        "--port",
        str(port),
        "--bind",
        host,
        "--dir",
        str(folder),
        "--save",
        "",
    ]
    if password:
        command += ["--requirepass", password]
    with (
        (folder / "redis.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        server = RedisServer(port, password)
        try:
            until(lambda: server.call("ping") == "PONG", "the Redis server did not answer", 30)
            yield server
        finally:
            process.terminate()
            process.wait(30)
