"""The machinefile: the hosts of a job, one a line.

    # id  host        port
    0     127.0.0.1   9999
    1     127.0.0.1   10999
    2     127.0.0.1   11999   role=server
    3     node3       9999    user=ml ssh_port=2222 gpus=0,1 python=/opt/ml/bin/python workdir=/scratch/ml

`<id> <host> <port>`, parted by any blanks; `#` starts a comment; empty lines are allowed. Ids are
0..n-1, each once, in any order. The host is a name, an IPv4 or an IPv6 address. The port is the
first of the client's server ports; 0 takes any free ones. Options may follow, `key=value`, each at
most once:

    role=server                 worker, server or both
    user=ml  ssh_port=2222      for SSH; without them ~/.ssh/config decides
    gpus=0,1                    devices of this host's workers: numbers or cpu; without it --gpu decides
    workers=2                   of this host on its CPU; without it --workers decides
    python=/opt/ml/bin/python   the interpreter: a program's name, or a path, ~/ being the user's home
    workdir=~/poseidon          the folder in which the processes run

Law: every mistake is one MachinefileError with file, line and what was expected. No value begins
with a dash or holds a blank, a quote or another sign that means something to a shell: none can be
taken for an option or a command.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from poseidon.base.foreign_files import read_definition
from poseidon.base.text_files import text_of
from poseidon.errors import MachinefileError

HIGHEST_PORT = 65535
MOST_HOSTS = 10_000
MOST_WORKERS = 1_000
"""Of one host."""
LAYOUT = "'<id> <host> <port>'"

_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}", re.ASCII)
_GPUS = re.compile(r"cpu|[0-9]{1,4}(,[0-9]{1,4})*", re.ASCII)
_PATH = re.compile(r"~?/[A-Za-z0-9_.+@,/-]{0,1000}", re.ASCII)
_PYTHON = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.+-]{{0,63}}|{_PATH.pattern}", re.ASCII)
_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", re.ASCII)
_SCOPE = re.compile(r"[A-Za-z0-9_.-]{1,32}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSettings:
    """SSH settings that are the same for all hosts.

    Attributes:
        config: a file read instead of ~/.ssh/config and /etc/ssh/ssh_config, as with `ssh -F`.
        connect_timeout_s: for each host, from the lookup of its name to the accepted key.
    """

    config: Path | None = None
    connect_timeout_s: float = 15.0

    @classmethod
    def from_flag(cls, config: str | None) -> SshSettings:
        """Return the settings for the value of `--ssh_config`; None or empty: OpenSSH's own
        files.
        """
        return cls(config=Path(config) if config else None)


class HostRole(Enum):
    """What a host is for."""

    BOTH = "both"
    """Workers, and server shards beside them."""
    WORKER = "worker"
    """Workers alone; its port is not used."""
    SERVER = "server"
    """Server shards alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """The options of one line, `key=value`.

    Attributes:
        role: what the host is for.
        user: to log in as over SSH; None: from `~/.ssh/config`, else the user of the launcher.
        ssh_port: of its sshd; None: from `~/.ssh/config`, else 22.
        gpus: the devices of its workers, in the syntax of `--gpu`; None: as `--gpu` says.
        workers: how many it has on its CPU; None: as `--workers` says.
        python: its interpreter, a program's name or a path (`~/` is the user's home); None: the
            launcher's own path where that exists, else `python3`.
        workdir: the folder its processes run in; None: the launcher's own where that exists, else
            the user's home.
    """

    role: HostRole = HostRole.BOTH
    user: str | None = None
    ssh_port: int | None = None
    gpus: str | None = None
    workers: int | None = None
    python: str | None = None
    workdir: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(HostOptions):
    """One line of a machinefile: a host, "client 3" in messages.

    Attributes:
        id: 0..n-1, "client 3" in messages.
        address: a name, an IPv4 address, or an IPv6 address without brackets.
        port: first port of its shards, 1..65535; 0 for any free ports.
        peer_address: where the other hosts reach it, once the host was checked; None: at `address`.
    """

    id: int
    address: str
    port: int
    peer_address: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this machine: a loopback address, at which SSH is to reach no other user or
        sshd, such as a container's.
        """
        return is_loopback(self.address) and self.user is None and self.ssh_port is None

    @property
    def name(self) -> str:
        """The host in messages and records: its address; at a loopback address with the user and
        the port of an sshd that is reached there.
        """
        if self.is_here or not is_loopback(self.address):
            return self.address
        port = "" if self.ssh_port is None else f":{self.ssh_port}"
        return f"{'' if self.user is None else f'{self.user}@'}{socket_host(self.address)}{port}"

    @property
    def socket_address(self) -> str:
        """The address at which the other hosts reach it, as it stands in `tcp://host:port`."""
        return socket_host(self.peer_address or self.address)

    @property
    def works(self) -> bool:
        """Whether the host may have workers."""
        return self.role is not HostRole.SERVER

    @property
    def serves(self) -> bool:
        """Whether the host may have shards."""
        return self.role is not HostRole.WORKER


def digest_of(hosts: Iterable[Host]) -> str:
    """Return a text that two machinefiles have in common if their lines say the same; hexadecimal."""
    lines = [replace(host, peer_address=None) for host in hosts]
    return hashlib.sha256(repr(lines).encode()).hexdigest()


def read_machinefile(path: Path, *, channels: int = 1) -> tuple[Host, ...]:
    """Read and check a machinefile.

    Args:
        path: the file.
        channels: shards per host (at least 1); shard c of a host takes port + c.

    Returns:
        The hosts in the order of their ids.

    Raises:
        MachinefileError: the file cannot be read, or a line is wrong.
    """
    try:
        text = text_of(read_definition(path))
    except FileNotFoundError as error:
        raise missing_machinefile(path) from error
    except OSError as error:
        raise MachinefileError(f"{path}: cannot read the machinefile: {error.strerror}") from error
    if text is None:
        raise MachinefileError(f"{path}: a machinefile is UTF-8 text; this is something else")
    return parse_machinefile(text, source=str(path), channels=channels)


def missing_machinefile(path: Path) -> MachinefileError:
    """Return the error for a machinefile that does not exist."""
    return MachinefileError(
        f"{path}: there is no such machinefile; expected a file with a line `<id> <host> <port>` "
        "for each client"
    )


def parse_machinefile(text: str, *, source: str, channels: int = 1) -> tuple[Host, ...]:
    """Parse the text of a machinefile; see `read_machinefile`.

    Args:
        text: the whole file.
        source: its name, for errors.
        channels: shards per host, at least 1.

    Raises:
        MachinefileError: with `source`, the line and what was expected.
    """
    found: list[tuple[int, Host]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        fields = line.partition("#")[0].split()
        if fields:
            if len(found) == MOST_HOSTS:
                raise MachinefileError(f"{source}:{number}: expected at most {MOST_HOSTS:,} hosts")
            found.append((number, _parse_line(fields, f"{source}:{number}", channels)))
    if not found:
        raise MachinefileError(
            f"{source}: no client found; expected one line {LAYOUT} for each machine"
        )
    _check_ids(found, source)
    _check_ports(found, source, channels)
    if not any(host.works for _, host in found):
        raise MachinefileError(
            f"{source}: every client has role=server; at least one client must have workers"
        )
    return tuple(sorted((host for _, host in found), key=lambda host: host.id))


@lru_cache(maxsize=MOST_HOSTS)
def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback one: localhost, 127.0.0.0/8, ::1."""
    if address.lower().rstrip(".") == "localhost":
        return True
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(number, "ipv4_mapped", None)
    return (mapped or number).is_loopback


def names_loopback(host: str) -> bool:
    """Return whether a request over HTTP is for loopback. A page of another site, whose name
    suddenly resolves to 127.0.0.1 (DNS rebinding), asks under that name.

    Args:
        host: its header Host, with or without a port.
    """
    return is_loopback(re.sub(r":\d*$", "", host).strip("[]"))


def has_remote_hosts(hosts: Iterable[Host]) -> bool:
    """Return whether a host is another machine than this one."""
    return not all(host.is_here for host in hosts)


def socket_host(address: str) -> str:
    """Return an address as it stands in `tcp://host:port`: IPv6 in brackets, localhost as its
    number.

    A server can bind to an address but not to a name, and `localhost` is the one name whose address
    is known.
    """
    if address.lower().rstrip(".") == "localhost":
        return "127.0.0.1"
    return f"[{address}]" if ":" in address else address


def _parse_line(fields: list[str], place: str, channels: int) -> Host:
    if len(fields) < 3:
        raise MachinefileError(f"{place}: expected {LAYOUT}, found '{' '.join(fields)}'")
    extra = parse_options(fields[3:], place)
    identifier = parse_number(fields[0], f"{place}: the client id")
    port = parse_number(fields[2], f"{place}: the port", highest=HIGHEST_PORT)
    if port and port + channels - 1 > HIGHEST_PORT and extra.role is not HostRole.WORKER:
        raise MachinefileError(
            f"{place}: {channels} shards from port {port} on go beyond port {HIGHEST_PORT}; "
            f"expected a port up to {HIGHEST_PORT - channels + 1}"
        )
    return Host(
        id=identifier,
        address=_parse_address(fields[1], place),
        port=port,
        **asdict(extra),
    )


def _parse_address(word: str, place: str) -> str:
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


def _check_ids(found: list[tuple[int, Host]], source: str) -> None:
    line_of: dict[int, int] = {}
    highest = len(found) - 1
    for line, host in found:
        if host.id in line_of:
            raise MachinefileError(
                f"{source}:{line}: client {host.id} is already on line {line_of[host.id]}; ids are "
                f"0 to {highest}, each once"
            )
        line_of[host.id] = line
    for line, host in found:
        if host.id > highest:
            missing = next(number for number in range(highest + 1) if number not in line_of)
            raise MachinefileError(
                f"{source}:{line}: client {host.id} is one of {len(found)}, so ids must be 0 to "
                f"{highest}, each once; {missing} is missing"
            )


def _check_ports(found: list[tuple[int, Host]], source: str, channels: int) -> None:
    # Lines with one host: their port ranges [port, port + channels) must not touch.
    taken = sorted(
        (_machine(host).lower(), host.port, line, host.id)
        for line, host in found
        if host.port and host.serves
    )
    for (address, port, line, first), (next_address, next_port, next_line, second) in pairwise(
        taken
    ):
        if address == next_address and next_port < port + channels:
            raise MachinefileError(
                f"{source}:{max(line, next_line)}: clients {first} and {second} on {address} share "
                f"port {next_port} (each takes {channels} from its own on); expected ports at "
                f"least {channels} apart, or 0"
            )


def _machine(host: Host) -> str:
    return host.name if host.name != host.address else socket_host(host.address)


def parse_options(options: Sequence[str], place: str) -> HostOptions:
    """Parse the options that follow the port.

    Args:
        options: as the line has them.
        place: file and line, for errors.

    Raises:
        MachinefileError: an option is unknown, is repeated, or has an illegal value.
    """
    found: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in _READERS or not equals:
            raise MachinefileError(f"{place}: {_unknown_option(option)}")
        if name in found:
            raise MachinefileError(f"{place}: a machine has one {name}, found a second {name}=")
        found[name] = _READERS[name](value, place)
    if "workers" in found and found.get("gpus", "cpu") != "cpu":
        raise MachinefileError(
            f"{place}: gpus={found['gpus']} gives each device a worker; leave out workers="
        )
    return HostOptions(**found)


def check_options(host: Host, place: str) -> None:
    """Check the options of a host that does not come from a machinefile.

    Raises:
        MachinefileError: one has an illegal value.
    """
    for name, read in _READERS.items():
        value = getattr(host, name)
        if value is not None:
            read(value.value if isinstance(value, Enum) else str(value), place)


def parse_number(word: str, what: str, highest: int | None = None) -> int:
    """Parse a whole number, 0 or more.

    Args:
        word: the number as it stands in the line.
        what: begins the error, `FILE:LINE: the port`.
        highest: the largest that is legal, if there is one.

    Raises:
        MachinefileError: it is not one.
    """
    if not _NUMBER.fullmatch(word) or (highest is not None and int(word) > highest):
        limits = "0, 1, 2, ..." if highest is None else f"0 to {highest}"
        raise MachinefileError(f"{what} must be a whole number ({limits}), not '{word}'")
    return int(word)


def _read_role(value: str, place: str) -> HostRole:
    try:
        return HostRole(value)
    except ValueError as error:
        raise MachinefileError(
            f"{place}: 'role={value}' is not a role; expected role=server, worker or both"
        ) from error


def _above_0(name: str, highest: int) -> Callable[[str, str], int]:
    """Return the reader of an option whose values are whole numbers from 1 on."""

    def read(value: str, place: str) -> int:
        number = parse_number(value, f"{place}: {name}", highest=highest)
        if not number:
            raise MachinefileError(f"{place}: {name} must be 1 to {highest}, not 0")
        return number

    return read


def _read_gpus(value: str, place: str) -> str:
    if not _GPUS.fullmatch(value):
        raise MachinefileError(
            f"{place}: 'gpus={value}': expected device numbers (gpus=0,1) or cpu"
        )
    numbers = value.split(",")
    if len({number.lstrip("0") for number in numbers}) < len(numbers):
        raise MachinefileError(f"{place}: 'gpus={value}' lists a device twice")
    return value


def _matching(name: str, form: re.Pattern[str], expected: str) -> Callable[[str, str], str]:
    """Return the reader of an option whose values have a form."""

    def read(value: str, place: str) -> str:
        if not form.fullmatch(value):
            raise MachinefileError(f"{place}: '{name}={value}'{expected}")
        return value

    return read


_EXPECTED_PATH = ": expected a path from / or ~/ on, of letters, digits and any of _ . + @ , / -"
_READERS: dict[str, Callable[[str, str], Any]] = {
    "role": _read_role,
    "user": _matching("user", _USER, " is not a user name"),
    "ssh_port": _above_0("ssh_port", HIGHEST_PORT),
    "gpus": _read_gpus,
    "workers": _above_0("workers", MOST_WORKERS),
    "python": _matching("python", _PYTHON, f"{_EXPECTED_PATH}, or a program's name"),
    "workdir": _matching("workdir", _PATH, _EXPECTED_PATH),
}


def _unknown_option(word: str) -> str:
    name, equals, _ = word.partition("=")
    if not equals:
        return f"unknown word '{word}' after {LAYOUT}"
    near = get_close_matches(name, _READERS, n=1)
    return f"unknown word '{word}'" + (
        f"; did you mean '{near[0]}='?" if near else f" after {LAYOUT}"
    )
