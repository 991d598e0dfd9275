"""The key file of a rendezvous, which only the tasks of a job can read, and the key pairs
derived from it.

Law: the key itself is never sent. Each side derives a key pair from it, accepts the other side's
pair only, and all messages are encrypted with session keys that are gone when the rendezvous ends.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

import zmq
from zmq.utils import z85

from poseidon.base.hints import own_command
from poseidon.errors import UsageError
from ps_server.keys import KeyPair, Keyring

MIN_KEY_BYTES = 32
MAX_KEY_BYTES = 4096


def read_key(path: Path) -> bytes:
    """Return the key in a file.

    Raises:
        UsageError: it cannot be read, others can read it, or it is too short or too long.
    """
    try:
        mode = path.stat().st_mode
        # To open a named pipe would wait for a writer; to read a folder is an error with a sentence
        # of its own.
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise UsageError(
                f"--key_file: {path} is not a regular file; every task must be able to read it; "
                f"make one with: {own_command()} worker --new_key=FILE"
            )
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            text = stream.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        new = path if isinstance(error, FileNotFoundError) else "FILE"
        raise UsageError(
            f"--key_file: cannot read {path}: {error.strerror}; make one with: {own_command()} "
            f"worker --new_key={new}"
        ) from error
    # A Secret of Kubernetes belongs to root and to the pod's group, which is the user's own.
    forbidden = 0o007 if status.st_uid == 0 and os.geteuid() != 0 else 0o077
    if stat.S_IMODE(status.st_mode) & forbidden:
        raise UsageError(
            f"--key_file: others can read {path}: 'chmod 600 {path}', and make a new key"
        )
    if not MIN_KEY_BYTES <= len(text) <= MAX_KEY_BYTES:
        raise UsageError(
            f"--key_file: {path} holds {len(text)} bytes; expected {MIN_KEY_BYTES} to "
            f"{MAX_KEY_BYTES} random bytes; make a key with: {own_command()} worker --new_key=FILE"
        )
    return text


def write_new_key(path: Path) -> None:
    """Write a random key to a new file that only its owner can read.

    Raises:
        UsageError: it cannot be written, or exists already.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as stream:
            stream.write(secrets.token_hex(32) + "\n")
    except FileExistsError as error:
        raise UsageError(
            f"--new_key: {path} exists already: use it as it is (--key_file={path}), or remove it "
            "if no job needs it"
        ) from error
    except OSError as error:
        raise UsageError(f"--new_key: cannot make {path}: {error.strerror}") from error


def server_keys(key: bytes) -> Keyring:
    """Return the keys of rank 0, which listens."""
    return Keyring(own=_pair(key, "rank 0"), admit=(_pair(key, "tasks").public,))


def task_keys(key: bytes) -> Keyring:
    """Return the keys of the tasks, which connect."""
    return Keyring(own=_pair(key, "tasks"), expect=(_pair(key, "rank 0").public,))


def _pair(key: bytes, role: str) -> KeyPair:
    """Derive a key pair; any 32 bytes are a secret key of Curve25519."""
    secret = z85.encode(hmac.digest(key, f"poseidon meeting 1, {role}".encode(), hashlib.sha256))
    return KeyPair(public=zmq.curve_public(secret).decode(), secret=secret.decode())
