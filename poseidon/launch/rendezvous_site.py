"""The hosts of a rendezvous, and the part that each task has in the job (docs/schedulers).

Rank 0 is the launcher; on each host the task with local rank 0 starts the processes; the others
wait.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from poseidon import __version__
from poseidon.cluster.agent.launcher import HostEnvironment, open_agents
from poseidon.cluster.host_checks import HostCheck, HostNeeds, check_hosts
from poseidon.cluster.jobs.registry import JobRecord, record_fields
from poseidon.cluster.machinefile import Host, socket_host
from poseidon.cluster.name_lookup import address_for_all, address_of, own_address_towards
from poseidon.cluster.remote_python import RemotePython
from poseidon.cluster.rendezvous.hosts import RendezvousHost
from poseidon.cluster.rendezvous.key import server_keys, task_keys
from poseidon.cluster.rendezvous.schedulers import Task
from poseidon.cluster.rendezvous.server import RendezvousServer
from poseidon.cluster.rendezvous.task import TaskSettings, run_task
from poseidon.cluster.rendezvous.task_connection import TaskConnection
from poseidon.cluster.rendezvous.task_signals import TaskSignals
from poseidon.cluster.rendezvous.wire import TaskInfo
from poseidon.cluster.supervision.signals import exit_code_of
from poseidon.errors import JobError, PoseidonError, UsageError
from poseidon.launch.processes import child_environment
from poseidon.launch.site import (
    AgentSiteLauncher,
    FileSet,
    Site,
    SiteLauncher,
    launcher_environment,
)
from poseidon.settings import inherited_environment

LEAVE_S = 30.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class RendezvousSite(Site):
    """A `Site` of the hosts on which tasks were started: agents over the tasks' connections to
    rank 0.

    Args:
        hosts: as the rendezvous has gathered them.
    """

    def __init__(self, hosts: Sequence[tuple[RendezvousHost, TaskConnection]]) -> None:
        self._connected = tuple(hosts)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """See `Site`. By rank; their shards take free ports."""
        return tuple(
            Host(id=number, address=plan.address, port=0)
            for number, (plan, _) in enumerate(self._connected)
        )

    @property
    def tasks_per_host(self) -> int:
        """The number of tasks on each host."""
        return self._connected[0][0].tasks

    def prepare(self, needs: Callable[[Host], HostNeeds]) -> None:
        """See `Site`. A host's address is the one that its task has sent."""
        environments = self._environments()
        check_hosts(
            [
                HostCheck(
                    connection=connection,
                    interpreter=environments[host.id].python.command(),
                    needs=(replace(needs(host), addresses=(host.address,)),),
                )
                for host, (_, connection) in zip(self.hosts, self._connected, strict=True)
            ]
        )

    def launcher(self, record: JobRecord, files: Callable[[], Sequence[FileSet]]) -> SiteLauncher:
        """See `Site`. Files are not sent: the hosts must have them under the same paths."""
        return AgentSiteLauncher(
            open_agents(self._environments(), record_fields(record), record.job)
        )

    def resume_command(self, command: str, changes: Mapping[str, str]) -> str:
        """See `Site`."""
        return f"the same tasks with {shlex.join(f'--{name}={value}' for name, value in changes.items())}"

    def _environments(self) -> dict[int, HostEnvironment]:
        own = launcher_environment()
        return {
            number: HostEnvironment(
                connection=connection,
                python=RemotePython(launcher=own, python=plan.python, workdir=plan.folder),
            )
            for number, (plan, connection) in enumerate(self._connected)
        }


def devices_of_tasks(gpu: str, app_threads: int, tasks: int) -> tuple[str, int]:
    """Return --gpu and --num_app_threads with a worker for each task.

    Args:
        gpu: the flag's value.
        app_threads: the flag's value.
        tasks: on each host. One alone leaves the flags as they are.

    Raises:
        UsageError: the flags ask for another number of workers.
    """
    if tasks == 1:
        return gpu, app_threads
    if not gpu:
        if app_threads not in (1, tasks):
            raise UsageError(
                f"--num_app_threads={app_threads} with {tasks} tasks on each host; expected "
                f"{tasks}, or one task"
            )
        return gpu, tasks
    if gpu == "all":
        return ",".join(map(str, range(tasks))), app_threads
    if gpu.count(",") + 1 != tasks:
        raise UsageError(
            f"--gpu={gpu} with {tasks} tasks on each host; expected as many devices, or all"
        )
    return gpu, app_threads


def take_part(
    task: Task, key: bytes, timeout_s: float, run_job: Callable[[RendezvousSite], int]
) -> int:
    """Take part in a job to its end; return the job's exit code.

    Args:
        task: this process.
        key: the secret of all tasks.
        timeout_s: how long to wait for the other tasks.
        run_job: launches the job; called on rank 0 alone.

    Raises:
        PoseidonError: not all tasks came, or the job failed.
    """
    with _signals_as_errors(task.rank):
        master = address_for_all(task.master, address_of(task.master, timeout_s))
        if task.rank == 0:
            return _lead(task, master, key, timeout_s, run_job)
        info = _task_info(task, own_address_towards(master))
        with _noted_signals() as noted:
            return run_task(
                f"tcp://{socket_host(master)}:{task.port}",
                task_keys(key),
                info,
                _settings(task, timeout_s),
                pending_signal=lambda: noted.pop() if noted else None,
            )


def _lead(
    task: Task, address: str, key: bytes, timeout_s: float, run_job: Callable[[RendezvousSite], int]
) -> int:
    """Run rank 0: serve the rendezvous, join it, and launch the job."""
    with (
        TaskSignals() as signals,
        RendezvousServer(
            address,
            task.port,
            server_keys(key),
            size=task.size,
            on_signal=signals.other_task_signalled,
        ) as rendezvous,
    ):
        own_part = threading.Thread(
            target=_run_own_task,
            # It waits longer than `gather`, whose error names the ranks that are missing.
            args=(rendezvous, key, _task_info(task, address), _settings(task, timeout_s + LEAVE_S)),
            name="poseidon rank 0",
            daemon=True,
        )
        own_part.start()
        code = 1
        try:
            code = run_job(RendezvousSite(rendezvous.gather(timeout_s)))
        except PoseidonError as error:
            code = error.exit_code
            raise
        finally:
            rendezvous.dismiss(code)
            own_part.join(LEAVE_S)
        return code


def _run_own_task(
    rendezvous: RendezvousServer, key: bytes, info: TaskInfo, settings: TaskSettings
) -> None:
    """Run rank 0's own task on its thread; an exception ends the wait for the other tasks."""
    try:
        run_task(rendezvous.address, task_keys(key), info, settings)
    except Exception as error:  # noqa: BLE001 - `gather` raises it; later the host counts as lost
        why = str(error) if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
        print(f"poseidon worker: rank 0's own task: {why}", file=sys.stderr)
        rendezvous.abort(f"rank 0's own task: {why}")


def _task_info(task: Task, address: str) -> TaskInfo:
    return TaskInfo(
        version=__version__,
        rank=task.rank,
        size=task.size,
        local_rank=task.local_rank,
        address=address,
        host=socket.gethostname(),
        python=sys.executable,
        folder=os.getcwd(),
    )


def _settings(task: Task, timeout_s: float) -> TaskSettings:
    return TaskSettings(
        join_timeout_s=timeout_s,
        runs_programs=task.leads_its_host,
        environment={**inherited_environment(), **child_environment(threads=1)},
    )


@contextmanager
def _noted_signals() -> Iterator[list[str]]:
    """Note signals that ask this process to end, for rank 0 to decide."""
    noted: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in _ENDING}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _signals_as_errors(rank: int) -> Iterator[None]:
    """Raise a JobError for a signal that asks this process to end, while neither the task nor
    its job has a handler.
    """

    def end(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        error = JobError(f"rank {rank} was ended by {name} while its job did not run")
        error.exit_code = exit_code_of(signal.Signals(number))
        raise error

    caught = [
        number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN
    ]  # nohup
    before = {number: signal.signal(number, end) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
