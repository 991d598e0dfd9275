"""The hosts that the tasks of a rendezvous run on.

Law: pure. On each host the task with local rank 0 starts all processes, as many workers as the
host has tasks; the hosts are numbered by the ranks of these tasks.

The key file of a rendezvous, which only the tasks of a job can read, and the key pairs
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from poseidon.base.paths import own_command
from poseidon.cluster.agent.messages import Join
from poseidon.errors import JobError, UsageError
from ps_server.keys import KeyPair, Keyring


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHost:
    """A host that tasks run on.

    Attributes:
        first: the task with local rank 0.
        tasks: how many run there.
    """

    first: Join
    tasks: int


def rejection_reason(task: Join, others: Sequence[Join], *, size: int, version: str) -> str | None:
    """Return why a task cannot join; None when it can.

    Args:
        task: the one that asks to join.
        others: those that have joined.
        size: the number of tasks that rank 0 expects.
        version: of rank 0's Poseidon.
    """
    who = f"rank {task.rank} on {task.host}"
    if task.version != version:
        return (
            f"{who} has Poseidon {task.version}, rank 0 has {version}; expected the same everywhere"
        )
    if task.size != size:
        return f"{who} expects {task.size} tasks, rank 0 {size}; do they belong to one job?"
    if task.rank >= size:
        return f"{who} is not one of {size} tasks"
    twin = next((other for other in others if other.rank == task.rank), None)
    if twin is not None:
        return f"{who} has joined already, on {twin.host}; expected each rank once"
    return None


def hosts_of(tasks: Sequence[Join]) -> tuple[TaskHost, ...]:
    """Return the hosts of tasks, by the rank of their first tasks.

    A task with local rank 0 is the first one of a host. Each other one is on a host of its name
    with as many tasks before it as its local rank says; of several, as containers of one machine,
    on the one whose first task has a rank that is lower by the local rank.

    Raises:
        JobError: local ranks leave one out, or rank 0 is not the first task of its host.
    """
    if any(task.local_rank for task in tasks if task.rank == 0):
        raise JobError(
            "rank 0 has a local rank other than 0; expected it to be the first task of its host"
        )
    hosts: dict[int, list[Join]] = {}
    for task in sorted(tasks, key=lambda task: (task.local_rank, task.rank)):
        if task.local_rank == 0:
            hosts[task.rank] = [task]
            continue
        fitting = {
            first: found
            for first, found in hosts.items()
            if found[0].host == task.host and len(found) == task.local_rank
        }
        if not fitting:
            raise JobError(
                f"rank {task.rank} on {task.host} has local rank {task.local_rank}, and no task "
                f"there has local rank {task.local_rank - 1}; expected 0, 1, ... on each host"
            )
        block = fitting.get(task.rank - task.local_rank)
        (block or next(iter(fitting.values()))).append(task)
    return tuple(TaskHost(first=found[0], tasks=len(found)) for found in hosts.values())


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
