"""The keys of a job: the key pair of each process, and the public keys that it admits and expects.

Law: each process has a pair of its own and the public halves of its peers, nothing else. Secrets
are in no `repr`, travel on standard input or in files that only their owner can read, and are of
one job.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from ps_server.errors import SpecError
from ps_server.json_fields import fields_of, plain, value_of

_KEY = re.compile(r"[0-9A-Za-z!#$%&()*+;<=>?@^_`{|}~-]{40}", re.ASCII)
"""The 32 bytes of a Curve25519 key in base 85: each process is sent those of all its peers."""
_LONGEST_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A Curve25519 pair, both halves in base 85.

    Args:
        public: identifies the process.
        secret: proves that identity.
    """

    public: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        check_public(self.public)
        if not _KEY.fullmatch(self.secret) or _public_of(self.secret) != self.public:
            raise SpecError(f"the secret key is not the one of public key {self.public}")

    @classmethod
    def new(cls) -> KeyPair:
        """Make a pair."""
        return cls.of(secrets.token_bytes(32))

    @classmethod
    def of(cls, secret: bytes) -> KeyPair:
        """Return the pair of a secret of 32 bytes; any are one."""
        text = base64.b85encode(secret).decode()
        return cls(public=_public_of(text), secret=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyring:
    """What one process needs to authenticate itself and its peers.

    Args:
        own: its pair.
        admit: public keys of the workers, by rank: a process that listens admits these and no
            others.
        expect: public keys of the shards, by index: a process that connects expects these.
    """

    own: KeyPair
    admit: tuple[str, ...] = ()
    expect: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_all(self.expect)
        _check_admitted(self.admit)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKeys:
    """A pair for every worker and shard of a job.

    Args:
        workers: by rank.
        shards: by index.
    """

    workers: tuple[KeyPair, ...] = field(repr=False)
    shards: tuple[KeyPair, ...] = field(repr=False)
    _admit: tuple[str, ...] = field(init=False, repr=False)
    _expect: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # once: each process of the job has them
        object.__setattr__(self, "_admit", tuple(pair.public for pair in self.workers))
        object.__setattr__(self, "_expect", tuple(pair.public for pair in self.shards))

    @classmethod
    def new(cls, *, workers: int, shards: int) -> JobKeys:
        """Make pairs for so many workers and shards."""
        return cls(
            workers=tuple(KeyPair.new() for _ in range(workers)),
            shards=tuple(KeyPair.new() for _ in range(shards)),
        )

    def of_worker(self, rank: int) -> Keyring:
        """Return a worker's keyring."""
        return Keyring(own=self.workers[rank], admit=self._admit, expect=self._expect)

    def of_shard(self, index: int) -> Keyring:
        """Return a shard's keyring."""
        return Keyring(own=self.shards[index], admit=self._admit)


def check_public(key: str) -> None:
    """Raise SpecError where a text is not a public key."""
    if not _KEY.fullmatch(key):
        raise SpecError(f"'{key:.60}' is not a public key; expected 40 characters of base 85")


def key_bytes(key: str) -> bytes:
    """Return the 32 bytes of a key.

    Raises:
        SpecError: 40 characters of base 85 that are more than 32 bytes.
    """
    try:
        return base64.b85decode(key)
    except ValueError as error:
        raise SpecError("a key is more than 32 bytes in base 85") from error


@lru_cache(maxsize=8)
def _check_all(keys: tuple[str, ...]) -> None:
    for key in keys:
        check_public(key)


@lru_cache(maxsize=8)
def _check_admitted(keys: tuple[str, ...]) -> None:
    _check_all(keys)
    if len(set(keys)) < len(keys):
        raise SpecError("two workers have the same public key; expected one for each")


def read_secret(path: Path) -> bytes:
    """Read a file that only its owner can read, at most a MiB of it.

    Raises:
        SpecError: others can read it, or it cannot be read.
    """
    try:
        with path.open("rb") as file:
            open_to_others = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077
            text = file.read(_LONGEST_FILE_BYTES)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}") from error
    if open_to_others:
        raise SpecError(f"{path} can be read by others: 'chmod 600 {path}', and make a new one")
    return text


def read_keyring(path: Path) -> Keyring:
    """Read the keyring in a file that only its owner can read.

    Raises:
        SpecError: others can read it, or it holds something else.
    """
    text = read_secret(path)
    try:
        return value_of(Keyring, json.loads(text))
    except (ValueError, RecursionError):  # its text may quote a secret
        raise SpecError(
            f"{path} holds no keys; expected a file of python -m ps_server.make_keys"
        ) from None


def write_keyring(path: Path, keys: Keyring) -> None:
    """Write a new file that only its owner can read.

    Raises:
        SpecError: it cannot be written, or exists.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(fields_of(keys), file, default=plain)
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror or error}") from error


def _public_of(secret: str) -> str:
    # a launcher that makes no keys starts without it
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    key = X25519PrivateKey.from_private_bytes(key_bytes(secret))
    return base64.b85encode(key.public_key().public_bytes_raw()).decode()
