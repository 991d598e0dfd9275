"""Rank and size of a task, from the environment of its scheduler: torchrun, Slurm, MPI, Kubernetes.

Law: pure; variables in, a `Task` out. The innermost scheduler decides: torchrun inside of a Slurm
step, and mpirun, whose daemons Slurm starts. A missing or illegal variable is one error that names
it.

Sources: torchrun's "Environment Variables", srun(1) "OUTPUT ENVIRONMENT VARIABLES", Open MPI's FAQ
(OMPI_COMM_WORLD_*), MPICH's Hydra (PMI_*, MPI_LOCALRANKID), Kubernetes' Indexed Jobs
(JOB_COMPLETION_INDEX).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from poseidon.errors import UsageError

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
        marks: by which it is recognized.
        rank, size, local_rank: of a task; the local rank may be unset.
    """

    name: str
    marks: tuple[str, ...]
    rank: str
    size: str
    local_rank: str


_TORCHRUN = _Scheduler(  # or anything else that sets these
    "torchrun", ("RANK", "WORLD_SIZE"), "RANK", "WORLD_SIZE", "LOCAL_RANK"
)
_OPEN_MPI = _Scheduler(
    "mpirun (Open MPI)",
    ("OMPI_COMM_WORLD_RANK",),
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
)
_HYDRA = _Scheduler(  # and what comes of MPICH
    "mpirun (MPICH, Intel MPI)",
    ("PMI_RANK", "MPI_LOCALRANKID"),
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
)
_KUBERNETES = _Scheduler(  # an Indexed Job
    "Kubernetes", ("JOB_COMPLETION_INDEX",), "JOB_COMPLETION_INDEX", "WORLD_SIZE", "LOCAL_RANK"
)
_SLURM = _Scheduler(
    "srun", ("SLURM_PROCID", "SLURM_STEP_ID"), "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"
)
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
    scheduler = next((one for one in _INNERMOST_FIRST if all(map(variables.get, one.marks))), None)
    if scheduler is None:
        raise UsageError(
            "no RANK and WORLD_SIZE (torchrun), SLURM_PROCID (srun), OMPI_COMM_WORLD_RANK or "
            "PMI_RANK (mpirun) and no JOB_COMPLETION_INDEX (Kubernetes) in the environment: "
            "'poseidon worker' is started by one of these; by hand it is 'poseidon train'"
        )
    size = _number(variables, scheduler.size, scheduler)
    if size == 0:
        raise UsageError(f"{scheduler.size} is 0, expected at least 1")
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
        raise UsageError(f"{name} is '{value:.40}', expected {limits}")
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
                f"MASTER_PORT is {port}, expected 1 to {HIGHEST_PORT}; choose a different one "
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
