"""The machinefile: which machines a job runs on, one client a line.

    # id  host        port
    0     127.0.0.1   9999
    1     127.0.0.1   10999
    2     127.0.0.1   11999   role=server
    3     node3       9999    user=ml ssh_port=2222 gpus=0,1 python=/opt/ml/bin/python workdir=/scratch/ml

`<id> <host> <port>`, parted by any blanks; `#` starts a comment; empty lines are allowed. Ids are
0..n-1, each once, in any order. The host is a name, an IPv4 or an IPv6 address. The port is the first
of the client's server ports; 0 takes any free ones. What may follow is in `poseidon.cluster.machine_words`.

Law: every mistake is one MachinefileError with file, line and what was expected; what comes out of here
needs no second look (no host can be taken for an option or a shell word).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from poseidon.cluster.machine_words import HIGHEST_PORT, LAYOUT, ClientRole, parse_number, parse_words
from poseidon.errors import MachinefileError

_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", re.ASCII)
_SCOPE = re.compile(r"[A-Za-z0-9_.-]{1,32}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One line of a machinefile.

    Attributes:
        id: 0..n-1.
        host: a name, an IPv4 address, or an IPv6 address without brackets.
        port: first port of the client's shards, 1..65535; 0 for any free ports.
        role: what the machine is for.
        user: who logs in over SSH; None: as `~/.ssh/config` says, else the user of the launcher.
        ssh_port: where its sshd listens; None: as `~/.ssh/config` says, else 22.
        gpus: the devices of its workers, as `--gpu` takes them; None: what `--gpu` says.
        python: its interpreter, a program's name or a path (`~/` is the user's home); None: the launcher's own
            path where that exists, else `python3`.
        workdir: the folder its processes run in; None: the launcher's own where that exists, else the user's home.
        address: where the others reach it, once the host was asked; None: at `host`.
    """

    id: int
    host: str
    port: int
    role: ClientRole = ClientRole.BOTH
    user: str | None = None
    ssh_port: int | None = None
    gpus: str | None = None
    python: str | None = None
    workdir: str | None = None
    address: str | None = None

    @property
    def reached_at(self) -> str:
        """Its address as it stands in `tcp://host:port`."""
        return socket_host(self.address or self.host)

    @property
    def works(self) -> bool:
        """Whether it may have workers."""
        return self.role is not ClientRole.SERVER

    @property
    def serves(self) -> bool:
        """Whether it may have shards."""
        return self.role is not ClientRole.WORKER


def read_machinefile(path: Path, *, channels: int = 1) -> tuple[Client, ...]:
    """Read and check a machinefile.

    Args:
        path: the file.
        channels: shards per client (at least 1); shard c of a client takes port + c.

    Returns:
        The clients in the order of their ids.

    Raises:
        MachinefileError: the file cannot be read, or a line is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise MachinefileError(f"{path}: there is no such machinefile") from error
    except UnicodeDecodeError as error:
        raise MachinefileError(f"{path}: a machinefile is UTF-8 text; this is something else") from error
    except OSError as error:
        raise MachinefileError(f"{path}: cannot read the machinefile: {error.strerror}") from error
    return parse_machinefile(text, source=str(path), channels=channels)


def parse_machinefile(text: str, *, source: str, channels: int = 1) -> tuple[Client, ...]:
    """The clients that the text of a machinefile names; see `read_machinefile`.

    Args:
        text: the whole file.
        source: its name, for errors.
        channels: shards per client, at least 1.

    Raises:
        MachinefileError: with `source`, the line and what was expected.
    """
    found: list[tuple[int, Client]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].split()
        if words:
            found.append((number, _parse_line(words, f"{source}:{number}", channels)))
    if not found:
        raise MachinefileError(f"{source}: no client found; expected one line {LAYOUT} for each machine")
    _check_ids(found, source)
    _check_ports(found, source, channels)
    if not any(client.works for _, client in found):
        raise MachinefileError(f"{source}: every client says role=server; expected a machine that works, too")
    return tuple(sorted((client for _, client in found), key=lambda client: client.id))


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by name or address alone: localhost, 127.0.0.0/8, ::1."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def has_other_machines(clients: Iterable[Client]) -> bool:
    """Whether a client is on another machine than this."""
    return any(not is_loopback(client.host) for client in clients)


def socket_host(host: str) -> str:
    """The host as it stands in a `tcp://host:port` address: IPv6 in brackets, localhost as its number.

    A server can bind to an address but not to a name, and `localhost` is the one name whose address is known.
    """
    if host.lower().rstrip(".") == "localhost":
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _parse_line(words: list[str], place: str, channels: int) -> Client:
    if len(words) < 3:
        raise MachinefileError(f"{place}: expected {LAYOUT}, found '{' '.join(words)}'")
    extra = parse_words(words[3:], place)
    identifier = parse_number(words[0], f"{place}: the client id")
    host = _parse_host(words[1], place)
    port = parse_number(words[2], f"{place}: the port", highest=HIGHEST_PORT)
    if port and port + channels - 1 > HIGHEST_PORT and extra.role is not ClientRole.WORKER:
        raise MachinefileError(
            f"{place}: {channels} shards from port {port} on go beyond port {HIGHEST_PORT}; "
            f"expected a port up to {HIGHEST_PORT - channels + 1}"
        )
    return Client(
        id=identifier,
        host=host,
        port=port,
        role=extra.role,
        user=extra.user,
        ssh_port=extra.ssh_port,
        gpus=extra.gpus,
        python=extra.python,
        workdir=extra.workdir,
    )


def _parse_host(word: str, place: str) -> str:
    host = word[1:-1] if word.startswith("[") and word.endswith("]") else word
    if ":" in host:
        address, percent, scope = host.partition("%")
        try:
            ipaddress.IPv6Address(address)
        except ValueError as error:
            raise MachinefileError(f"{place}: '{word}' is not an IPv6 address") from error
        if percent and not _SCOPE.fullmatch(scope):
            raise MachinefileError(f"{place}: '{word}' has no valid interface name after '%'")
        return host
    labels = host.rstrip(".").split(".")
    if labels[-1].isdigit():
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError as error:
            raise MachinefileError(f"{place}: '{word}' is not an IPv4 address") from error
    if host != word or len(host) > 253 or not all(_HOST_LABEL.fullmatch(label) for label in labels):
        raise MachinefileError(f"{place}: '{word}' is neither a host name nor an address")
    return host


def _check_ids(found: list[tuple[int, Client]], source: str) -> None:
    line_of: dict[int, int] = {}
    highest = len(found) - 1
    for line, client in found:
        if client.id in line_of:
            raise MachinefileError(
                f"{source}:{line}: client {client.id} is already on line {line_of[client.id]}; ids are 0 to "
                f"{highest}, each once"
            )
        line_of[client.id] = line
    for line, client in found:
        if client.id > highest:
            missing = next(number for number in range(highest + 1) if number not in line_of)
            raise MachinefileError(
                f"{source}:{line}: client {client.id} is one of {len(found)}, so ids must be 0 to {highest}, "
                f"each once; {missing} is missing"
            )


def _check_ports(found: list[tuple[int, Client]], source: str, channels: int) -> None:
    # Clients that share a host: their port ranges [port, port + channels) must not touch.
    taken = sorted(
        (socket_host(client.host).lower(), client.port, line, client.id)
        for line, client in found
        if client.port and client.serves
    )
    for (host, port, line, first), (next_host, next_port, next_line, second) in pairwise(taken):
        if host == next_host and next_port < port + channels:
            raise MachinefileError(
                f"{source}:{max(line, next_line)}: clients {first} and {second} on {host} share port {next_port} "
                f"(each takes {channels} from its own on); expected ports at least {channels} apart, or 0"
            )
