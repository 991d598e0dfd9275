"""The tasks of a scheduler's job: which one this process is, the hosts that they run on, and the key
by which they meet.

Laws:
* Pure, the files of keys apart. A missing or illegal variable is one error that names it.
* The innermost scheduler decides: torchrun inside of a Slurm step, and mpirun, whose daemons Slurm
  starts.
* On each host the task with local rank 0 starts all processes, as many workers as the host has
  tasks; the hosts are numbered by the ranks of these tasks.
* The key itself, in a file that only the tasks of a job can read, is never sent. Each side derives a
  key pair from it, accepts the other side's pair only, and all messages are encrypted with session
  keys that are gone when the rendezvous ends.

Sources: torchrun's "Environment Variables", srun(1) "OUTPUT ENVIRONMENT VARIABLES", Open MPI's FAQ
(OMPI_COMM_WORLD_*), MPICH's Hydra (PMI_*, MPI_LOCALRANKID), Kubernetes' Indexed Jobs
(JOB_COMPLETION_INDEX).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
            f"{who} has Poseidon {task.version}, rank 0 has {version}; install the same version "
            "everywhere"
        )
    if task.size != size:
        return f"{who} expects {task.size} tasks, rank 0 {size}; do they belong to one job?"
    if not 0 <= task.rank < size:
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
    """Derive a key pair."""
    return KeyPair.of(hmac.digest(key, f"poseidon meeting 1, {role}".encode(), hashlib.sha256))


_NUMBER = re.compile(r"[0-9]{1,6}", re.ASCII)
# The first entry of a Slurm list such as rack[1-2]n[03-07,9],login1: of each bracket the first
# number counts.
_FIRST_OF_LIST = re.compile(r"[A-Za-z0-9_.-](?:[A-Za-z0-9_.-]|\[[0-9]+[^\]]*\])*", re.ASCII)
_BRACKET = re.compile(r"\[([0-9]+)[^\]]*\]", re.ASCII)
FIRST_SLURM_PORT, SLURM_PORTS = 15_000, 15_000
HIGHEST_PORT = 65_535


class _Scheduler(NamedTuple):
    """A program that starts tasks, by the variables that it sets.

    Attributes:
        name: in messages.
        rank, size, local_rank: of a task; the local rank may be unset.
        mark: one by which it is recognized, beside the rank.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    mark: str


# or anything else that sets these
_TORCHRUN = _Scheduler("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", mark="WORLD_SIZE")
_OPEN_MPI = _Scheduler(
    "mpirun (Open MPI)",
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    mark="OMPI_COMM_WORLD_RANK",
)
_HYDRA = _Scheduler(  # and what comes of MPICH
    "mpirun (MPICH, Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", mark="MPI_LOCALRANKID"
)
_KUBERNETES = _Scheduler(  # an Indexed Job
    *("Kubernetes", "JOB_COMPLETION_INDEX", "WORLD_SIZE", "LOCAL_RANK"), mark="JOB_COMPLETION_INDEX"
)
_SLURM = _Scheduler("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", mark="SLURM_STEP_ID")
_INNERMOST_FIRST = (_TORCHRUN, _OPEN_MPI, _HYDRA, _KUBERNETES, _SLURM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One of the processes that a scheduler has started.

    Attributes:
        rank: 0..size-1 over all hosts.
        size: the number of tasks.
        local_rank: 0, 1, ... on its host.
        master: host name or address of rank 0.
        port: on which rank 0 listens.
    """

    rank: int
    size: int
    local_rank: int
    master: str
    port: int


def task_from(variables: Mapping[str, str], *, port: int | None = None) -> Task:
    """Return the task that the environment describes.

    Args:
        variables: the environment.
        port: on which rank 0 listens, in place of the environment's.

    Raises:
        UsageError: no scheduler has started this process, or a variable is missing or illegal.
    """
    marked = (
        one for one in _INNERMOST_FIRST if variables.get(one.rank) and variables.get(one.mark)
    )
    scheduler = next(marked, None)
    if scheduler is None:
        raise UsageError(
            "no RANK and WORLD_SIZE (torchrun), SLURM_PROCID (srun), OMPI_COMM_WORLD_RANK or "
            "PMI_RANK (mpirun) and no JOB_COMPLETION_INDEX (Kubernetes) in the environment: "
            "'poseidon worker' is started by one of these; by hand it is 'poseidon train'"
        )
    size = _number(variables, scheduler.size, scheduler)
    if size == 0:
        raise UsageError(f"{scheduler.size} is 0; expected at least 1")
    rank = _number(variables, scheduler.rank, scheduler, below=size)
    local_rank = (
        _number(variables, scheduler.local_rank, scheduler, below=size)
        if variables.get(scheduler.local_rank)
        else 0
    )
    return Task(
        rank=rank,
        size=size,
        local_rank=local_rank,
        master=_master(variables, scheduler, alone=size == 1),
        port=_port(variables, scheduler) if port is None else port,
    )


def first_host(hosts: str) -> str | None:
    """Return the first host of a list in Slurm's syntax; None where there is none.

    >>> first_host("gpu[03-07,12],login1")
    'gpu03'
    """
    match = _FIRST_OF_LIST.match(hosts)
    return _BRACKET.sub(r"\1", match[0]) if match else None


def _number(
    variables: Mapping[str, str], name: str, scheduler: _Scheduler, below: int | None = None
) -> int:
    value = variables.get(name, "")
    if not value:
        raise UsageError(f"{scheduler.name} has started this process, but {name} is not set")
    if not _NUMBER.fullmatch(value) or (below is not None and int(value) >= below):
        limits = "a whole number" if below is None else f"0 to {below - 1}"
        raise UsageError(f"{name} is '{value:.40}'; expected {limits}")
    return int(value)


def _master(variables: Mapping[str, str], scheduler: _Scheduler, *, alone: bool) -> str:
    if master := variables.get("MASTER_ADDR"):
        return master
    if scheduler is _SLURM:
        found = first_host(
            variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
        )
        if found:
            return found
    if alone:
        return "127.0.0.1"
    raise UsageError(
        f"MASTER_ADDR is not set: {scheduler.name} has to give every task the host of rank 0"
        + (" (mpirun -x MASTER_ADDR=<host>)" if scheduler is _OPEN_MPI else "")
        + (" (mpirun -genv MASTER_ADDR <host>)" if scheduler is _HYDRA else "")
    )


def _port(variables: Mapping[str, str], scheduler: _Scheduler) -> int:
    """Return rank 0's port: MASTER_PORT, the next where torchrun itself listens
    on that, or one from Slurm's job number.
    """
    if variables.get("MASTER_PORT"):
        port = _number(variables, "MASTER_PORT", scheduler)
        port += variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if not 0 < port <= HIGHEST_PORT:
            raise UsageError(
                f"MASTER_PORT is {port}; expected 1 to {HIGHEST_PORT}; choose a different one "
                "with --rendezvous_port"
            )
        return port
    if scheduler is _SLURM and (job := variables.get("SLURM_JOB_ID", "")).isdecimal():
        # Two steps of one job on one host need two ports; other jobs rarely clash.
        step = variables.get("SLURM_STEP_ID", "")
        number = int(job) * 7 + (int(step) if step.isdecimal() else 0)
        return FIRST_SLURM_PORT + number % SLURM_PORTS
    raise UsageError(
        "MASTER_PORT is not set: expected it in every task's environment, or --rendezvous_port=P"
    )
