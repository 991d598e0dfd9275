"""A real sshd on 127.0.0.1 with keys made for the test: for tests that need SSH but no other host.

`sshd -i` serves one connection on its standard input; the listening is done here, so no port is
chosen before it is bound, and a test can break every line at once.
"""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support import needs


@dataclass(slots=True)
class LoopbackSshd:
    """A server and a client's configuration for it, in a folder of their own.

    Attributes:
        folder: holds keys and configurations; `config` is the client's, for `ssh -F`.
    """

    folder: Path
    host: str = "127.0.0.1"
    _listener: socket.socket = field(init=False)
    _sessions: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        needs.require("sshd")
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._listener = socket.create_server((self.host, 0), family=family)
        for name in ("host", "client"):
            make_key(self.folder / name)
        shutil.copy(self.folder / "client.pub", self.folder / "authorized_keys")
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self.server_config.write_text(
            f"HostKey {self.folder}/host\nAuthorizedKeysFile "
            f"{self.folder}/authorized_keys\nStrictModes no\n"
            "UsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication "
            "no\nPermitRootLogin yes\n"
            "AllowTcpForwarding yes\nPidFile none\nMaxSessions "
            "20\nPrintMotd no\n"
        )
        self.known_hosts.write_text(f"[{self.host}]:{self.port} {self.host_key}\n")
        self.config.write_text(
            f"Host *\n  Port {self.port}\n  User {getpass.getuser()}\n  IdentityFile "
            f"{self.folder}/client\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {self.known_hosts}\n  "
            "GlobalKnownHostsFile /dev/null\n"
        )
        self._thread = threading.Thread(target=self._serve, name="test sshd", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def config(self) -> Path:
        return self.folder / "client_config"

    @property
    def server_config(self) -> Path:
        return self.folder / "sshd_config"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def host_key(self) -> str:
        """`ssh-ed25519 AAAA...`."""
        return " ".join((self.folder / "host.pub").read_text().split()[:2])

    def break_lines(self) -> None:
        """End every connection as a host that crashes does."""
        for process in self._halt():
            process.kill()
        for session in self._sessions:
            session.wait(60)

    @contextmanager
    def halted(self) -> Iterator[None]:
        """Keep every connection open without an answer inside the block."""
        halted = self._halt()
        try:
            yield
        finally:
            for process in halted:
                with suppress(psutil.NoSuchProcess):  # its connection was closed meanwhile
                    process.resume()

    def _halt(self) -> list[psutil.Process]:
        """Halt the processes that serve connections, but not the processes of commands.

        Since OpenSSH 9.8 some are children.
        """
        halted = []
        for session in self._sessions:
            with suppress(psutil.NoSuchProcess):
                first = psutil.Process(session.pid)
                first.suspend()  # it has no new child from here on
                halted.append(first)
                for child in first.children(recursive=True):
                    if child.name().startswith("sshd"):
                        child.suspend()
                        halted.append(child)
        return halted

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)
        self.break_lines()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            with line:
                self.serve(line)

    def serve(self, line: socket.socket) -> None:
        """Serve a connection, of another port too."""
        program = needs.find("sshd")
        assert program is not None
        argv = [program, "-i", "-e", "-f", str(self.server_config)]
        with (self.folder / "sshd.log").open("ab") as log:
            self._sessions.append(subprocess.Popen(argv, stdin=line, stdout=line, stderr=log))


def make_key(path: Path, passphrase: str = "") -> Path:
    """Make an Ed25519 key pair."""
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "test", "-f", str(path)]
    subprocess.run(words, check=True, timeout=60, stdin=subprocess.DEVNULL)
    return path
