"""What OpenSSH's files say about a host: its settings, and the keys that the user trusts.

Settings come from the machinefile's options, then ~/.ssh/config and /etc/ssh/ssh_config, then
OpenSSH's defaults. Read are Host, Match, Include, HostName, User, Port, IdentityFile, IdentitiesOnly,
ProxyJump, ProxyCommand, HostKeyAlias, UserKnownHostsFile and GlobalKnownHostsFile.

Laws:
* No setting switches the check of host keys off; StrictHostKeyChecking is ignored.
* A key is accepted only if a line of known_hosts names the host and holds this key, and no line
  revokes it. Lines that cannot be read, and certificate authorities, are ignored.
* `shell_command` is the only place where a remote command line is made. sh, bash, dash, zsh, fish and
  csh each split the line into the same arguments again, and nothing in it is expanded or run.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import io
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import paramiko

from poseidon.base.foreign_files import read_definition
from poseidon.base.settings import expanded, name_user
from poseidon.cluster.machinefile import Host, SshSettings
from poseidon.errors import JobError

SSH_PORT = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKey:
    """A public key of a host.

    Attributes:
        kind: `ssh-ed25519`, `ssh-rsa`, ...
        blob: the key as it travels.
    """

    kind: str
    blob: bytes

    @property
    def base64(self) -> str:
        """The key as known_hosts has it."""
        return base64.b64encode(self.blob).decode()

    @property
    def fingerprint(self) -> str:
        """The fingerprint `SHA256:...`, as `ssh-keygen -l` prints it."""
        digest = hashlib.sha256(self.blob).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownHost:
    """One line: the hosts that it names, the key, and whether the key is revoked."""

    patterns: tuple[str, ...]
    key: HostKey
    revoked: bool

    def names(self, host: str) -> bool:
        """Return whether the line names a host, given as `host_name` returns it."""
        if any(_fits(host, pattern[1:]) for pattern in self.patterns if pattern[:1] == "!"):
            return False
        return any(_matches(host, pattern) for pattern in self.patterns if pattern[:1] != "!")


def host_name(host: str, port: int) -> str:
    """Return a host as known_hosts names it: `node3`, or `[node3]:2222` where the port is not
    22.
    """
    host = host.lower()
    return host if port == SSH_PORT else f"[{host}]:{port}"


def parse_known_hosts(lines: Iterable[str]) -> tuple[KnownHost, ...]:
    """Return all lines that hold a key."""
    return tuple(known for line in lines if (known := _parse(line)) is not None)


def kinds_known(known: Sequence[KnownHost], host: str) -> tuple[str, ...]:
    """Return the kinds of keys that are trusted for a host; they are requested first."""
    return tuple(
        dict.fromkeys(line.key.kind for line in known if not line.revoked and line.names(host))
    )


def rejection(known: Sequence[KnownHost], host: str, key: HostKey, file: Path) -> str | None:
    """Return why a host's key is not trusted, with the fingerprint and the remedy; None when it is.

    Args:
        known: the lines of all known_hosts files.
        host: as `host_name` returns it.
        key: the key that the host presented.
        file: the user's own known_hosts, for the command.
    """
    about = [line for line in known if line.names(host)]
    shown = f"{key.kind} {key.fingerprint}"
    if any(line.revoked and line.key == key for line in about):
        return f"its host key {shown} is revoked in known_hosts"
    trusted = [line.key for line in about if not line.revoked]
    if key in trusted:
        return None
    added = shlex.quote(f"{host} {key.kind} {key.base64}")
    if file == Path(os.devnull):
        return (
            f"its host key {shown} is not known, and UserKnownHostsFile {file} keeps none: name a "
            f"file there; if that is the host's own fingerprint, run: echo {added} >> THAT_FILE"
        )
    add = f"echo {added} >> {shlex.quote(str(file))}"
    if any(other.kind == key.kind for other in trusted):
        old = next(other for other in trusted if other.kind == key.kind)
        forget = f"ssh-keygen -R {shlex.quote(host)} -f {shlex.quote(str(file))}"
        return (
            f"its host key has changed from {old.fingerprint} to {shown}: someone may be in "
            f"between; if the change is legitimate, run: {forget} && {add}"
        )
    return f"its host key {shown} is not known; if that is the host's own fingerprint, run: {add}"


def _parse(line: str) -> KnownHost | None:
    fields = line.split()
    marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
    if len(fields) < 3 or fields[0].startswith("#") or marker not in ("", "@revoked"):
        return None
    try:
        blob = base64.b64decode(fields[2], validate=True)
    except (binascii.Error, ValueError):
        return None
    patterns = tuple(fields[0].split(","))
    return KnownHost(
        patterns=patterns, key=HostKey(kind=fields[1], blob=blob), revoked=marker == "@revoked"
    )


def _matches(host: str, pattern: str) -> bool:
    if not pattern.startswith("|1|"):
        return _fits(host, pattern)
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in pattern[3:].split("|"))
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(hmac.digest(salt, host.encode(), "sha1"), digest)


def _fits(host: str, pattern: str) -> bool:
    pattern = pattern.lower()
    if "*" not in pattern and "?" not in pattern:  # nearly all; a pattern is compiled
        return host == pattern
    # Brackets are part of a name here, not a choice of letters.
    return fnmatchcase(host, pattern.replace("[", "[[]"))


# Characters that have no meaning to any shell.
_PLAIN = re.compile(r"[A-Za-z0-9_./:,+-]+", re.ASCII)
# Inside single quotes fish gives the backslash a meaning and csh the '!'; one backslash before
# each, outside of quotes, is understood by all.
_ESCAPED = {"\\": "\\\\", "'": "\\'", "!": "\\!"}
_PIECE = re.compile(r"[\\'!]|[^\\'!]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def shell_command(argv: Sequence[str]) -> str:
    """Return the command line that runs `argv`.

    >>> shell_command(["python3", "-m", "it's", ""])
    "'python3' -m 'it'\\\\''s' ''"

    Args:
        argv: the program and its arguments; the program is not empty and no option.

    Raises:
        JobError: an argument holds a control character, such as a line end, which not every shell
            accepts; or there is no program.
    """
    if not argv or not argv[0] or argv[0].startswith("-"):
        raise JobError(f"{' '.join(argv)!r:.200} is not a command: expected a program's name first")
    for word in argv:
        if _CONTROL.search(word):
            raise JobError(
                f"{word!r:.200} cannot stand in a remote command: it holds a control character, "
                "or is not UTF-8"
            )
    # A quoted name is neither an alias nor a keyword of the shell (`if`, `exec`).
    first = _quoted(argv[0])
    return " ".join(
        [first, *(word if _PLAIN.fullmatch(word) else _quoted(word) for word in argv[1:])]
    )


def _quoted(word: str) -> str:
    pieces = (_ESCAPED.get(piece) or f"'{piece}'" for piece in _PIECE.findall(word))
    return "".join(pieces) or "''"


SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
SYSTEM_KNOWN_HOSTS = (Path("/etc/ssh/ssh_known_hosts"), Path("/etc/ssh/ssh_known_hosts2"))
DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
MAX_DEPTH = 8

_INCLUDE = re.compile(r"\s*include[\s=]+(.*\S)\s*", re.IGNORECASE)
_FILES = re.compile(
    r"\s*((?:identity|userknownhosts|globalknownhosts)file)[\s=]+(.*\S)\s*", re.IGNORECASE
)
_FINAL = re.compile(r"(\s*match[\s=]+final)[\s]+all\s*", re.IGNORECASE)
"""The same as `Match final`, which paramiko reads: Red Hat's /etc/ssh/ssh_config.d has it."""
_NOT_READ = re.compile(r"\s*canonicalizehostname\b.*", re.IGNORECASE)
"""Paramiko would look the name up, in place of HostName."""
_BETWEEN = "\x1f"
"""Stands between the files of a line, whose names may have blanks."""
_JUMP = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>\[[^\]]+\]|[^:\[\]]+)(?::(?P<port>\d{1,5}))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address and credentials of a host; equal endpoints share a connection.

    Attributes:
        name: as the machinefile has it.
        host: the name or address to connect to.
        port: of its sshd.
        user: to log in as.
        identities: private keys to try, in order.
        with_agent: whether to try the SSH agent's keys, too.
        alias: the name under which its host key is known, `host` in most cases.
        known_hosts: files with its host key; the first is the user's own.
        jumps: ProxyJump hosts, nearest first, `user@host:port` each.
        proxy_command: ProxyCommand, a program that makes the connection; empty in most cases.
    """

    name: str
    host: str
    port: int
    user: str
    identities: tuple[Path, ...]
    with_agent: bool
    alias: str
    known_hosts: tuple[Path, ...]
    jumps: tuple[str, ...] = ()
    proxy_command: str = ""

    @property
    def label(self) -> str:
        """The host in messages: `ml@node3`, with the port where it is not 22."""
        host = f"[{self.host}]" if ":" in self.host and self.port != SSH_PORT else self.host
        return f"{self.user}@{host}" + ("" if self.port == SSH_PORT else f":{self.port}")


class SshConfig:
    """The user's SSH configuration.

    Raises:
        JobError: the file cannot be read or is not an SSH configuration.
    """

    def __init__(self, settings: SshSettings) -> None:
        files = (settings.config,) if settings.config else (_folder() / "config", SYSTEM_CONFIG)
        self._files = ", ".join(str(file) for file in files)
        lines: list[str] = []
        for file in files:
            if settings.config is not None and not file.is_file():
                raise JobError(f"there is no SSH configuration {file}")
            lines += ["Host *", *_lines(file, MAX_DEPTH)]
        try:
            self._config = paramiko.SSHConfig.from_file(io.StringIO("\n".join(lines) + "\n"))
        except (paramiko.SSHException, ValueError) as error:
            raise JobError(f"{self._files}: {error}") from error

    def endpoint(self, host: Host) -> Endpoint:
        """Return the endpoint of a host.

        Raises:
            JobError: the configuration has an illegal value for it.
        """
        return self._endpoint(host.address, host.user, host.ssh_port)

    def jump(self, text: str) -> Endpoint:
        """Return the endpoint of a ProxyJump host.

        Raises:
            JobError: the text is not `user@host:port`.
        """
        match = _JUMP.fullmatch(text.strip())
        if match is None or match["host"].startswith("-"):
            raise JobError(f"{self._files}: ProxyJump '{text}' is not [user@]host[:port]")
        port = int(match["port"]) if match["port"] else None
        return self._endpoint(match["host"].strip("[]"), match["user"], port)

    def _endpoint(self, name: str, user: str | None, port: int | None) -> Endpoint:
        try:
            found = self._config.lookup(name)
            given = found.get("port", "22")
            if not given.isdecimal():
                raise ValueError(f"Port {given} is not a number")
            dialled = port or int(given)
        except (paramiko.SSHException, ImportError, ValueError) as error:
            raise JobError(f"{self._files}: illegal settings for {name}: {error}") from error
        identities = _paths(list(found.get("identityfile", [])))
        own = _paths(found.get("userknownhostsfile", "").split(_BETWEEN))
        system = _paths(found.get("globalknownhostsfile", "").split(_BETWEEN))
        jumps = found.get("proxyjump", "none")
        command = found.get("proxycommand") or "none"
        return Endpoint(
            name=name,
            host=found.get("hostname", name),
            port=dialled,
            user=user or found.get("user") or name_user(),
            identities=tuple(identities or default_identities()),
            with_agent=found.get("identitiesonly", "no").lower() not in ("yes", "true"),
            alias=found.get("hostkeyalias") or found.get("hostname", name),
            known_hosts=tuple(
                (own or [_folder() / "known_hosts"]) + (system or list(SYSTEM_KNOWN_HOSTS))
            ),
            jumps=() if jumps.lower() == "none" else tuple(jumps.split(",")),
            proxy_command="" if command.lower() == "none" else command,
        )


def default_identities() -> list[Path]:
    """Return the keys that are tried if the configuration names none."""
    return [_folder() / key for key in DEFAULT_KEYS]


def _folder() -> Path:
    return expanded("~/.ssh")


def _paths(words: list[str]) -> list[Path]:
    return [expanded(word) for word in words if word]


def _words(text: str, file: Path) -> list[str]:
    """Return the words of a value; a word with blanks is in quotes."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise JobError(f"{file}: {text}: a quote is not closed") from error


def _lines(file: Path, depth: int) -> Iterator[str]:
    """Yield the lines of a configuration, included files in place."""
    if not file.is_file() or not depth:
        return
    try:
        text = read_definition(file).decode(errors="backslashreplace")
    except OSError as error:
        raise JobError(f"cannot read the SSH configuration {file}: {error.strerror}") from error
    for line in text.splitlines():
        if (match := _FILES.fullmatch(line)) is not None:
            yield f"{match[1]} {_BETWEEN.join(_words(match[2], file))}"
            continue
        match = _INCLUDE.fullmatch(line)
        if match is None:
            if _NOT_READ.fullmatch(line) is None:
                yield _FINAL.sub(r"\1", line)
            continue
        for pattern in _paths(_words(match[1], file)):
            base = Path("/etc/ssh") if file == SYSTEM_CONFIG else _folder()
            whole = pattern if pattern.is_absolute() else base / pattern
            for found in sorted(whole.parent.glob(whole.name)):
                yield from _lines(found, depth - 1)
