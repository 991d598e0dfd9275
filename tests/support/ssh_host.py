"""One real host: a set of namespaces whose first process is its sshd; `tests.support.ssh_hosts`
makes several that know each other.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.testbed import links
from benchmarks.testbed.hosts import Host
from tests.support.live_processes import none_left
from tests.support.needs import find

ROOT = Path(__file__).resolve().parents[2]
HOME = Path("/root")
PORT = 22
OTHER_PORT = 2222
"""A second port of every sshd, for `ssh_port=`."""
START_LIMIT_S = 20.0
RUN_LIMIT_S = 100.0

_SSHD_CONFIG = f"""\
Port {PORT}
Port {OTHER_PORT}
HostKey /etc/ssh/host_key
AuthorizedKeysFile .ssh/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PermitRootLogin prohibit-password
PidFile none
MaxStartups 100
"""


class SshHost:
    """A host of its own namespaces.

    Args:
        link: its network.
        folder: where its files are kept, seen from the test.
        known: `/etc/hosts`.

    Attributes:
        name: `host0`, known to all hosts.
        address: its IPv4 address.
        address6: its IPv6 address.
    """

    def __init__(self, link: Host, folder: Path, known: str) -> None:
        self.name = f"host{link.index}"
        self.address = link.address
        self.address6 = address6(link.index)
        self._link = link
        self._folder = folder
        self._first: subprocess.Popen[bytes] | None = None
        for each in ("root", "tmp", "etc_ssh", "empty"):
            (folder / each).mkdir(parents=True, mode=0o700)
        (folder / "hosts").write_text(known, encoding="ascii")
        (folder / "etc_ssh" / "sshd_config").write_text(_SSHD_CONFIG, encoding="ascii")
        make_key(folder / "etc_ssh" / "host_key")

    @property
    def host_key(self) -> str:
        """The public host key: type and base 64."""
        return " ".join(
            (self._folder / "etc_ssh" / "host_key.pub").read_text(encoding="ascii").split()[:2]
        )

    @property
    def network(self) -> str:
        """The name of its network namespace."""
        return self._link.name

    def outside(self, inside: str | Path) -> Path:
        """Return the test's path of a file below /root or /tmp of this host."""
        path = Path(inside)
        if path.is_relative_to(HOME):
            return self._folder / "root" / path.relative_to(HOME)
        return self._folder / "tmp" / path.relative_to("/tmp")

    def start(self) -> None:
        """Boot the host and return at once. See `wait_until_up`."""
        words = ["setpriv", "--pdeathsig", "KILL", *self._link.enter]
        words += [
            "unshare",
            "--mount",
            "--pid",
            "--uts",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
        ]
        with (self._folder / "sshd.log").open("ab") as log:
            self._first = subprocess.Popen(
                [*words, self._boot_script()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean_environment(),
            )

    def wait_until_up(self) -> None:
        """Wait for its sshd."""
        end_s = time.monotonic() + START_LIMIT_S
        while True:
            try:
                with socket.create_connection((self.address, PORT), timeout=START_LIMIT_S):
                    return
            except OSError:
                assert self._first is not None and self._first.poll() is None, self.log()
                assert time.monotonic() < end_s, self.log()
                time.sleep(0.01)

    def log(self) -> str:
        """Return the log of its sshd."""
        return (self._folder / "sshd.log").read_text(encoding="utf-8", errors="replace")

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on the host, in /root, as a child."""
        enter = ["nsenter", "--target", str(self._init().pid), "--mount", "--net", "--pid", "--uts"]
        return [*enter, "env", "--chdir", str(HOME), *argv]

    def run(
        self, argv: Sequence[str], *, check: bool = True, timeout_s: float = RUN_LIMIT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host, without SSH.

        Args:
            argv: the command.
            check: whether another exit status than 0 fails the test.
            timeout_s: limit of the whole.
        """
        words = self.command(argv)
        done = subprocess.run(
            words,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the host without sshd and its sessions; pids are the test's."""
        here = _namespace(self._init().pid)
        found = [process for process in psutil.process_iter() if _namespace(process.pid) == here]
        return [process for process in found if not _is_sshd(process)]

    def processes_of(self, job: str) -> list[psutil.Process]:
        """Return the processes with the id of a job among their arguments."""
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                found += [process] if job in process.cmdline() else []
        return found

    def crash(self) -> None:
        """Kill all its processes at once. `start` boots it again."""
        self._init().kill()
        self.close()

    def close(self) -> None:
        """Kill all its processes, if it runs; return when they have ended: no port accepts a
        connection any more.
        """
        if self._first is not None:
            inside: list[int] = []
            with suppress(psutil.NoSuchProcess):
                inside = [child.pid for child in psutil.Process(self._first.pid).children()]
            self._first.kill()  # and, by --kill-child, everything below
            self._first.wait(START_LIMIT_S)
            self._first = None
            none_left(inside)  # the first process inside ends last

    def cut(self) -> None:
        """Cut its link: packets are lost, and neither side is notified."""
        links.cut(self._link.name)

    def mend(self) -> None:
        """Restore its link."""
        links.mend(self._link.name, self._link.name.rpartition("h")[0])

    def _init(self) -> psutil.Process:
        """Return its first process, which has pid 1 inside."""
        assert self._first is not None, f"{self.name} is down"
        (init,) = psutil.Process(self._first.pid).children()
        return init

    def _boot_script(self) -> str:
        own = {HOME: self._folder / "root", Path("/tmp"): self._folder / "tmp"}
        group = self._folder.parent
        if not any(group.is_relative_to(path) for path in own):
            own[group] = self._folder / "empty"
        lines = ["set -e", "mount --make-rprivate /"]
        for path, mine in own.items():
            for kept in _common_paths(path):
                place = mine / kept.relative_to(path)
                lines += [f"mkdir -p '{place}'", f"mount --bind '{kept}' '{place}'"]
        lines += [
            f"mount --bind '{self._folder}/etc_ssh' /etc/ssh",
            f"mount --bind '{self._folder}/hosts' /etc/hosts",
        ]
        # The folder that holds all the others is hidden last.
        order = sorted(own, key=group.is_relative_to)
        lines += [f"mount --rbind '{own[path]}' '{path}'" for path in order]
        lines += [
            "mount -t tmpfs tmpfs /dev/shm",
            "mount -t tmpfs tmpfs /run",
            "mkdir /run/sshd",
            f"hostname {self.name}",
        ]
        return "\n".join([*lines, f"exec {find('sshd')} -D -e"])


def known_hosts_line(host: SshHost) -> str:
    """Return a host's line of `known_hosts`, with all its names and both its ports."""
    names = (host.name, host.address, host.address6)
    others = [f"[{name}]:{OTHER_PORT}" for name in names]
    return f"{','.join([*names, *others])} {host.host_key}\n"


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a login, with this Python first on the path."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    return {
        "PATH": path,
        "HOME": str(HOME),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        **(more or {}),
    }


def make_key(path: Path) -> None:
    """Make a key pair without a passphrase."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", path], check=True
    )


def address6(index: int) -> str:
    """Return the IPv6 address of host `index`."""
    return f"fd13:2130::{index + 1:x}"


def _common_paths(hidden: Path) -> list[Path]:
    """Return the paths in a hidden folder that every host shares: the checkout and the Python."""
    common = {ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    below = sorted(path for path in common if path.is_relative_to(hidden))
    return [path for path in below if not any(parent in below for parent in path.parents)]


def _namespace(pid: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def _is_sshd(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.name() == "sshd" or process.status() == psutil.STATUS_ZOMBIE
    return True
