"""`poseidon worker`: one of the tasks that torchrun, srun, mpirun or Kubernetes has started becomes part of a job.

srun --ntasks-per-node=1 poseidon worker --key_file=$HOME/.poseidon.key train --solver=solver.prototxt

The task with rank 0 is the launcher; on each host the task with local rank 0 starts the processes; the others wait.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from poseidon import __version__
from poseidon.cli.main import parse_words, run_command
from poseidon.cli.own_signals import OwnSignals
from poseidon.cluster.machinefile import socket_host
from poseidon.cluster.rendezvous.address import address_for_all, address_of, own_address_towards
from poseidon.cluster.rendezvous.key import keys_of_host, keys_of_task, read_key, write_new_key
from poseidon.cluster.rendezvous.schedulers import Task, task_from
from poseidon.cluster.rendezvous.server import Meeting
from poseidon.cluster.rendezvous.task import AttendanceSettings, attend
from poseidon.cluster.rendezvous.wire import Arrival
from poseidon.errors import JobError, PoseidonError, UsageError
from poseidon.launch.rendezvous_site import MetSite, share_out_devices
from poseidon.launch.site import child_environment
from poseidon.settings import inherited_environment

LEAVE_S = 30.0


def run(arguments: argparse.Namespace) -> int:
    """Take part in a job to its end; returns the job's exit code.

    Raises:
        PoseidonError: a mistake in flags, environment or key, or the job failed.
    """
    if arguments.new_key:
        write_new_key(Path(arguments.new_key))
        print(f"{arguments.new_key}: a new key. Every task needs it, and nobody else must read it.")
        return 0
    if not arguments.key_file:
        raise UsageError(
            "--key_file is missing: make one with 'poseidon worker --new_key=FILE', for all tasks"
        )
    if not arguments.meeting_timeout > 0:
        raise UsageError(f"--meeting_timeout={arguments.meeting_timeout:g}: expected more than 0 seconds")
    flags = _job_flags(arguments.command_words)
    key = read_key(Path(arguments.key_file))
    task = task_from(inherited_environment(), port=arguments.rendezvous_port)
    master = address_for_all(task.master, address_of(task.master, arguments.meeting_timeout))
    if task.rank == 0:
        return _launch(task, master, key, flags, arguments.meeting_timeout)
    arrival = _arrival(task, own_address_towards(master))
    with _noted_signals() as asked:
        return attend(
            f"tcp://{socket_host(master)}:{task.port}",
            keys_of_task(key),
            arrival,
            _attendance(task, arguments.meeting_timeout),
            asked_to_end=lambda: asked.pop() if asked else None,
        )


def _launch(task: Task, host: str, key: bytes, flags: argparse.Namespace, timeout_s: float) -> int:
    """Be rank 0: hold the meeting, take part in it, and launch the job."""
    with (
        OwnSignals() as signals,
        Meeting(
            host, task.port, keys_of_host(key), size=task.size, on_asked=signals.asked_elsewhere
        ) as meeting,
    ):
        mine = threading.Thread(
            target=_attend_quietly,
            args=(meeting.address, key, _arrival(task, host), _attendance(task, timeout_s)),
            name="poseidon rank 0",
            daemon=True,
        )
        mine.start()
        code = 1
        try:
            met = meeting.gather(timeout_s)
            share_out_devices(flags, met[0][0].tasks)
            flags.site = MetSite(met)
            code = run_command(flags)
        except PoseidonError as error:
            code = error.exit_code
            raise
        finally:
            meeting.dismiss(code)
            mine.join(LEAVE_S)
        return code


def _attend_quietly(address: str, key: bytes, arrival: Arrival, settings: AttendanceSettings) -> None:
    try:
        attend(address, keys_of_task(key), arrival, settings)
    except JobError as error:
        print(f"poseidon worker: rank 0 to itself: {error}", file=sys.stderr)


def _arrival(task: Task, address: str) -> Arrival:
    return Arrival(
        version=__version__,
        rank=task.rank,
        size=task.size,
        local_rank=task.local_rank,
        address=address,
        host=socket.gethostname(),
        python=sys.executable,
        folder=os.getcwd(),
    )


def _attendance(task: Task, timeout_s: float) -> AttendanceSettings:
    return AttendanceSettings(
        arrive_timeout_s=timeout_s,
        runs_programs=task.leads_its_host,
        environment={**inherited_environment(), **child_environment(threads=1)},
    )


def _job_flags(words: Sequence[str]) -> argparse.Namespace:
    """What the words of the job say.

    Raises:
        UsageError: there are none, or one that has no place here.
    """
    words = list(words[1:] if words[:1] == ["--"] else words)
    if not words or words[0] not in ("train", "run"):
        raise UsageError(
            "the job is missing: expected 'train' or 'run' and its flags after those of 'worker'"
        )
    flags = parse_words(words)
    if flags.hostfile:
        raise UsageError("--hostfile has no place here: the hosts are those on which the tasks were started")
    if flags.background:
        raise UsageError("--background has no place here: what has started the tasks waits for them")
    return flags


@contextmanager
def _noted_signals() -> Iterator[list[str]]:
    """Signals that ask this process to end go into a list, for rank 0 to decide."""
    noted: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(signal.Signals(number).name)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
