"""The part that a task of a scheduler has in a job: flags, rank 0's life, and its signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from poseidon.cluster.agent.messages import Join
from poseidon.cluster.dial.tasks import Rendezvous, TaskDialer
from poseidon.cluster.host_probe import HostNeeds, NeededFile
from poseidon.cluster.machinefile import Host
from poseidon.cluster.rendezvous import Task, task_from
from poseidon.errors import JobError, UsageError
from poseidon.launcher.site import Site
from poseidon.launcher.tasks import take_part, with_a_worker_for_each_task

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import os, signal, sys, threading
from poseidon.launcher import tasks

taken = []
came = threading.Event()
def take(*_):
    taken.append(1)
    came.set()
signal.signal(signal.SIGTERM, take)
tasks.WAIT_S = float(sys.argv[2])
with tasks.TaskSignals() as signals:
    if sys.argv[1] == "both":
        os.kill(os.getpid(), signal.SIGTERM)
    signals.other_task_signalled(lambda: False)
    signals.other_task_signalled(lambda: False)
    [thread.join(30) for thread in threading.enumerate() if thread.name == "poseidon asked to end"]
    came.wait(30)
print(len(taken))
"""


def printed(program: str, *words: str) -> tuple[str, str]:
    """Run a program in a process of its own; return its output and its errors."""
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(("who", "wait_s"), [("another", "0"), ("both", "30")])
def test_one_request_reaches_the_launcher(who: str, wait_s: str) -> None:
    assert printed(SCRIPT, who, wait_s)[0] == "1\n"


LEAVES = """
import queue, signal
from poseidon.launcher import tasks

taken = []
signal.signal(signal.SIGTERM, lambda *_: taken.append(1))
left = queue.SimpleQueue()
tasks.WAIT_S = 0.0
with tasks.TaskSignals() as signals:
    for task in "ab":
        signals.other_task_signalled(lambda task=task: left.put(task) is None)
    print(left.get(timeout=30), left.get(timeout=30), len(taken))
"""


@pytest.mark.processes
def test_hosts_of_other_tasks_leave_where_they_can() -> None:
    assert printed(LEAVES)[0] == "a b 0\n"


ENDED = """
import os, signal, time
from poseidon.launcher import tasks

taken = []
signal.signal(signal.SIGTERM, lambda *_: taken.append(1))
tasks.WAIT_S = 0.3
with tasks.TaskSignals() as signals:
    signals.other_task_signalled(lambda: False)
time.sleep(1.0)
print(len(taken))
"""


@pytest.mark.processes
def test_a_job_that_has_ended_is_not_signalled() -> None:
    assert printed(ENDED)[0] == "0\n"


BROKEN = """
import logging, os, signal, threading
from poseidon.launcher import tasks

logging.basicConfig(format="%(message)s")
came = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: came.set())
def fail(*_):
    raise ValueError("negative argument")
os.read = fail
tasks.WAIT_S = 30.0
with tasks.TaskSignals() as signals:
    signals.other_task_signalled(lambda: False)
    came.wait(30)
print(came.is_set())
"""


@pytest.mark.processes
def test_a_failure_is_logged_and_the_request_still_reaches_the_launcher() -> None:
    said, errors = printed(BROKEN)
    assert said == "True\n"
    assert errors.startswith("cannot tell whether only this task was signalled")
    assert errors.endswith(": ValueError('negative argument')\n")


KEY = b"k" * 64


def rank_0_of(size: int) -> Task:
    variables = {"RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    task = task_from(variables, port=0)
    assert task is not None
    return task


def test_rank_0_runs_the_job_on_the_hosts_that_have_met() -> None:
    def run_job(dialer: TaskDialer) -> int:
        (host,) = dialer.hosts
        assert (host.id, host.address, host.port) == (0, "127.0.0.1", 0)
        assert dialer.tasks == (1,)
        assert dialer.resume_command("poseidon train", {"snapshot": "a b"}) == (
            "the same tasks with '--snapshot=a b'"
        )
        return 3

    assert take_part(rank_0_of(1), KEY, 60.0, run_job) == 3


def test_what_a_host_lacks_is_told_before_anything_starts() -> None:
    def run_job(dialer: TaskDialer) -> int:
        site = Site(dialer.hosts, dialer)
        try:
            site.prepare("j", lambda host: HostNeeds(id=host.id, addresses=()))
            files = (NeededFile(name="/no/db", folder="."),)
            site.prepare("j", lambda host: HostNeeds(id=host.id, addresses=(), files=files))
        finally:
            site.close()
        return 0

    with pytest.raises(JobError, match=r"^rank 0 \(\S+\): there is no /no/db"):
        take_part(rank_0_of(1), KEY, 60.0, run_job)


HOSTS = tuple(Host(id=number, address=f"node{number}", port=0) for number in range(2))


@pytest.mark.parametrize(
    ("tasks", "gpu", "threads", "gpus", "workers"),
    [
        ((1, 1), "0,1", 1, (None, None), (None, None)),  # the flags decide
        ((1, 1), "", 3, (None, None), (None, None)),
        ((4, 4), "", 1, (None, None), (4, 4)),
        ((2, 1), "cpu", 1, (None, None), (2, 1)),
        ((4, 4), "", 4, (None, None), (4, 4)),
        ((3, 1), "all", 1, ("0,1,2", "0"), (None, None)),
        ((2, 2), "1,3", 1, ("1,3", "1,3"), (None, None)),
    ],
)
def test_several_tasks_are_several_workers(
    tasks: tuple[int, ...],
    gpu: str,
    threads: int,
    gpus: tuple[str | None, ...],
    workers: tuple[int | None, ...],
) -> None:
    found = with_a_worker_for_each_task(HOSTS, tasks, gpu=gpu, workers=threads)
    assert tuple(host.gpus for host in found) == gpus
    assert tuple(host.workers for host in found) == workers


@pytest.mark.parametrize(
    ("tasks", "gpu", "threads", "message"),
    [
        ((2, 2), "", 3, "--workers=3 with 2 tasks on node0"),
        ((2, 1), "", 2, "--workers=2 with 1 task on node1"),
        ((2, 1), "0,1", 1, "--gpu=0,1 with 1 task on node1"),
    ],
)
def test_flags_that_say_another_number(
    tasks: tuple[int, ...], gpu: str, threads: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        with_a_worker_for_each_task(HOSTS, tasks, gpu=gpu, workers=threads)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_rank_0_that_is_ended_while_it_waits(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    gather = Rendezvous.gather

    def gather_and_be_signalled(rendezvous: Rendezvous, own: Join, timeout_s: float) -> object:
        threading.Thread(target=os.kill, args=(os.getpid(), number)).start()
        return gather(rendezvous, own, timeout_s)

    monkeypatch.setattr(Rendezvous, "gather", gather_and_be_signalled)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(
            JobError, match=f"^rank 0 was ended by {number.name} while its job did not run$"
        ) as caught:
            take_part(rank_0_of(2), KEY, 60.0, lambda dialer: 0)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert caught.value.exit_code == 128 + number


def test_rank_0_that_waits_in_vain_names_who_is_missing_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(JobError, match=r"^of 2 tasks these did not join at \S+ within 2 s"):
        take_part(rank_0_of(2), KEY, 2.0, lambda dialer: 0)
    assert capfd.readouterr().err == ""
