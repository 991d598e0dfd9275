"""What the commands that start jobs have in common: the children's environment, and the job's record."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Protocol

import psutil

from poseidon.cluster.host_checks import ClientNeeds
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registration, Registry
from poseidon.cluster.machinefile import Host, is_loopback, read_machinefile
from poseidon.cluster.process import Launcher
from poseidon.cluster.remote_python import LauncherEnvironment
from poseidon.errors import JobError
from poseidon.metrics.job_statistics import FILE_NAME
from poseidon.proto.paths import repository_root
from poseidon.settings import inherited_environment, read_settings

JOIN_AT_ONCE = "glibc.malloc.mxfast=0"
"""A tunable of glibc: small freed blocks are joined with free neighbours at once."""
PAST_CACHES = "glibc.cpu.x86_non_temporal_threshold=0x100000"
"""A tunable of glibc: copies of 1 MiB and more write past the caches. By itself glibc takes the whole last cache for its own, however
many share it, and reads every line from memory that it then overwrites; so a chunk's copy takes about half the time."""


class ClosingLauncher(Launcher, Protocol):
    """A launcher that holds on to something."""

    def close(self) -> None:
        """End what it still runs, and let go."""


class Site(Protocol):
    """Machines that are known without a machinefile: those that an engine of the site has chosen."""

    @property
    def clients(self) -> tuple[Host, ...]:
        """One for each."""

    def prepare(self, needs: Mapping[int, ClientNeeds]) -> None:
        """Have each host look for what its clients need, before anything starts.

        Args:
            needs: of each client, by its id; their addresses are added here.

        Raises:
            JobError: lists what is in the way on all hosts.
        """

    def launcher(self, record: JobRecord) -> ClosingLauncher:
        """What starts a job's processes there.

        Raises:
            JobError: what is in the way.
        """

    def close(self) -> None:
        """Let go of the machines. May be called twice."""


def launcher_environment() -> LauncherEnvironment:
    """Where this process runs, for hosts that are laid out alike."""
    return LauncherEnvironment(python=sys.executable, checkout=str(repository_root()), folder=os.getcwd())


def read_clients(hostfile: str | None, channels: int) -> tuple[Host, ...]:
    """The clients of a machinefile; this machine alone without one.

    Raises:
        MachinefileError: a line is wrong.
    """
    if not hostfile:
        return (Host(id=0, address="127.0.0.1", port=0),)
    return read_machinefile(Path(hostfile), channels=channels)


def require_near(hostfile: str | None, clients: tuple[Host, ...]) -> None:
    """Refuse other machines, for a command that starts its processes on this one only.

    Raises:
        JobError: a client is another machine.
    """
    for client in clients:
        if not is_loopback(client.address):
            raise JobError(
                f"{hostfile}: client {client.id} is on {client.address}; this command works on "
                "this machine only (127.0.0.1, ::1, localhost)"
            )


def register_job(job: str, hostfile: str | None, clients: tuple[Host, ...], output: Path) -> Registration:
    """Put a job that this process launches on record, for `poseidon ps` and `poseidon kill`.

    Raises:
        JobError: the record cannot be written.
    """
    me = psutil.Process()
    launcher = RecordedProcess(name="launcher", host="127.0.0.1", pid=me.pid, created_s=me.create_time())
    record = JobRecord(
        job=job,
        launcher=launcher,
        hostfile=str(Path(hostfile).resolve()) if hostfile else None,
        hosts=clients,
        output=str(output),
        started_s=datetime.now().timestamp(),
    )
    return Registration(Registry(read_settings().state_folder), record)


@contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Make a job's folder. A new one goes again where the block fails and nothing was written there.

    Raises:
        JobError: it cannot be made.
    """
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"cannot make the output folder {folder}: {error.strerror}") from error
    try:
        yield
    except BaseException:
        if new:
            remove_unused(folder, [folder / FILE_NAME])
        raise


def remove_unused(folder: Path, given: Collection[Path] = ()) -> None:
    """Remove a job's folder that holds nothing but empty files.

    Args:
        folder: of the job's logs.
        given: files in it that do not count, since they are worth nothing without the job.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path not in given]
    if not any(path.stat().st_size for path in files):
        shutil.rmtree(folder, ignore_errors=True)


def child_environment(threads: int) -> dict[str, str]:
    """What a child needs beyond our own environment.

    Args:
        threads: CPU threads of its arithmetic.

    The malloc settings keep large freed blocks in the process: activations and gradients are allocated anew each
    iteration, and giving them back to the system means touching fresh pages every time. And they join small freed blocks
    with their neighbours at once: glibc would put that off until a thread frees or asks for something large, which a
    thread that works on small tensors alone never does, and its memory would grow with each of them. Large copies go past the
    caches.
    """
    from ps_server.numerics import environment  # imports torch, which commands that start nothing do not need

    inherited = inherited_environment()
    paths = [str(repository_root())]
    paths += [path for path in sys.path if path.endswith("site-packages")]
    paths += filter(None, inherited.get("PYTHONPATH", "").split(os.pathsep))
    return {
        **environment(threads, inherited),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        "MALLOC_TOP_PAD_": str(2**26),
        "GLIBC_TUNABLES": _tunables(inherited.get("GLIBC_TUNABLES", "")),
    }


def _tunables(inherited: str) -> str:
    """Ours, and then the user's, which have the last word."""
    said = inherited.split(":") if inherited else []
    return ":".join(dict.fromkeys([JOIN_AT_ONCE, PAST_CACHES, *said]))
