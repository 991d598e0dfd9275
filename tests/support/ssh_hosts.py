"""Real hosts for tests: each has a network, process numbers, a name, a file tree and an sshd of
its own.

    with SshHosts(tmp_path, 4) as hosts:
        hosts[2].run(["hostname"]).stdout                    # as that host's root
        hosts[2].outside("/root/data")                       # the same file, seen from the test
        subprocess.run(["ssh", hosts[2].address, "true"], env=hosts.environment())    # HOME has keys and known hosts
        subprocess.run(hosts[0].command(["ssh", "host2", "true"]))    # from host to host, by name

A host is a set of namespaces (network, mount, process, name) whose first process is its sshd: when
that dies, so does everything on the host. All hosts have one key pair and one `known_hosts`, in
/root/.ssh.

Law: hosts see one system, one checkout and one Python, and nothing else in common: /root, /tmp and
the test's folder are each host's own. Nothing is left when the block ends.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import overload

from benchmarks.testbed import links
from benchmarks.testbed.hosts import Hosts
from tests.support.needs import require
from tests.support.ssh_host import (
    HOME,
    OTHER_PORT,
    PORT,
    ROOT,
    SshHost,
    address6,
    clean_environment,
    known_hosts_line,
    make_key,
)

__all__ = ["OTHER_PORT", "PORT", "ROOT", "SshHost", "SshHosts", "clean_environment"]


SECOND_NETWORK = "10.213.77.{}"


class SshHosts(Sequence[SshHost]):
    """Hosts that reach each other and the test. See the module's docstring.

    Args:
        folder: of the test; a folder `hosts` is made there.
        count: how many, 1..99.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder / "hosts"
        self._count = count
        self._stack = ExitStack()
        self._hosts: list[SshHost] = []
        self.address = ""
        """The test's own."""

    @property
    def home(self) -> Path:
        """A home folder with the key pair and `known_hosts`, for a launcher that the test starts
        itself.
        """
        return self._folder / "home"

    def environment(self) -> dict[str, str]:
        """Return the environment of a command that the test starts outside the hosts."""
        return clean_environment({"HOME": str(self.home)})

    def second_network(self, one: SshHost, other: SshHost) -> Mapping[str, str]:
        """Connect two hosts by a second network.

        Return their addresses there, by the hosts' names.
        """
        addresses = {one.name: SECOND_NETWORK.format(1), other.name: SECOND_NETWORK.format(2)}
        links.connect({host.network: addresses[host.name] for host in (one, other)})
        return addresses

    def __enter__(self) -> SshHosts:
        with ExitStack() as stack:
            self._make(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _make(self, stack: ExitStack) -> None:
        require("hosts")
        subnet = _free_subnet()
        network = stack.enter_context(Hosts(self._count, subnet=subnet))
        self.address = f"{subnet}.254"
        links.join(network.bridge, self.address)
        lines = [
            f"{link.address} host{link.index}\n{address6(link.index)} host{link.index}"
            for link in network
        ]
        known = "\n".join(["127.0.0.1 localhost", "::1 localhost", *lines, ""])
        for link in network:
            links.add_ipv6(link.name, address6(link.index))
            self._hosts.append(SshHost(link, self._folder / f"host{link.index}", known))
        self._spread_keys()
        for host in self._hosts:
            stack.callback(host.close)
            host.start()
        for host in self._hosts:
            host.wait_until_up()

    def _spread_keys(self) -> None:
        user = self.home / ".ssh"
        user.mkdir(parents=True, mode=0o700)
        make_key(user / "id_ed25519")
        (user / "known_hosts").write_text(
            "".join(map(known_hosts_line, self._hosts)), encoding="ascii"
        )
        shutil.copy(user / "id_ed25519.pub", user / "authorized_keys")
        for host in self._hosts:
            shutil.copytree(user, host.outside(HOME / ".ssh"))

    def __len__(self) -> int:
        return len(self._hosts)

    @overload
    def __getitem__(self, index: int) -> SshHost: ...

    @overload
    def __getitem__(self, index: slice) -> list[SshHost]: ...

    def __getitem__(self, index: int | slice) -> SshHost | list[SshHost]:
        return self._hosts[index]

    def __iter__(self) -> Iterator[SshHost]:
        return iter(self._hosts)


def _free_subnet() -> str:
    """Return a subnet that no other test on this machine uses."""
    taken = links.addresses()
    tried = [f"10.214.{(os.getpid() + step) % 256}" for step in range(256)]
    return next(subnet for subnet in tried if f"{subnet}.254" not in taken)
