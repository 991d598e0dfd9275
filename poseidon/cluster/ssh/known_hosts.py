"""The host keys that the user trusts: OpenSSH's known_hosts files, with OpenSSH's rules.

Law: pure. A key is accepted only when a line names the host and holds this key, and no line revokes
it. Lines that cannot be read, and certificate authorities, are ignored.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

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
