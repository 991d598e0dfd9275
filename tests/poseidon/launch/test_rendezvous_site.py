"""The machines of a meeting as those of a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from poseidon.cluster.host_checks import HostNeeds, NeededFile
from poseidon.cluster.rendezvous.hosts import RendezvousHost
from poseidon.cluster.rendezvous.schedulers import task_from
from poseidon.cluster.rendezvous.server import RendezvousServer
from poseidon.cluster.rendezvous.task_connection import TaskConnection
from poseidon.cluster.ssh.channel import Finished
from poseidon.errors import JobError, UsageError
from poseidon.launch.rendezvous_site import RendezvousSite, devices_of_tasks, take_part


def test_one_client_for_each_host() -> None:
    plans = [
        RendezvousHost(rank=rank, address=f"10.0.0.{rank}", host=f"node{rank}", tasks=2)
        for rank in (0, 2)
    ]
    site = RendezvousSite(
        [(plan, TaskConnection(plan.host, plan.address, lambda _: None)) for plan in plans]
    )
    assert [(client.id, client.address, client.port) for client in site.hosts] == [
        (0, "10.0.0.0", 0),
        (1, "10.0.0.2", 0),
    ]


class HostHere(TaskConnection):
    """A met host whose programs run on this machine."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Finished:
        done = subprocess.run(
            argv, check=False, input=stdin, capture_output=True, timeout=timeout_s
        )
        return Finished(status=done.returncode, stdout=done.stdout, stderr=done.stderr)


def test_what_a_host_lacks_is_told_before_anything_starts() -> None:
    plan = RendezvousHost(
        rank=0,
        address="127.0.0.1",
        host="node0",
        tasks=1,
        python=sys.executable,
        folder=os.getcwd(),
    )
    site = RendezvousSite([(plan, HostHere("rank 0 (node0)", plan.address, lambda _: None))])
    needs = HostNeeds(id=0, addresses=())
    site.prepare(lambda host: needs)
    with pytest.raises(JobError, match=r"rank 0 \(node0\): there is no /no/db"):
        site.prepare(lambda host: replace(needs, files=(NeededFile(name="/no/db", folder="."),)))


@pytest.mark.parametrize(
    ("tasks", "gpu", "threads", "expected"),
    [
        (1, "0,1", 1, ("0,1", 1)),
        (1, "all", 1, ("all", 1)),
        (1, "", 3, ("", 3)),
        (4, "", 1, ("", 4)),
        (4, "", 4, ("", 4)),
        (3, "all", 1, ("0,1,2", 1)),
        (2, "1,3", 1, ("1,3", 1)),
    ],
)
def test_several_tasks_are_several_workers(
    tasks: int, gpu: str, threads: int, expected: tuple[str, int]
) -> None:
    assert devices_of_tasks(gpu, threads, tasks) == expected


@pytest.mark.parametrize(
    ("tasks", "gpu", "threads", "message"),
    [
        (2, "", 3, "--num_app_threads=3 with 2 tasks on each host"),
        (2, "0", 1, "--gpu=0 with 2 tasks on each host"),
    ],
)
def test_flags_that_say_another_number(tasks: int, gpu: str, threads: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        devices_of_tasks(gpu, threads, tasks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_rank_0_that_is_ended_while_it_waits(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    gather = RendezvousServer.gather

    def gather_and_be_signalled(server: RendezvousServer, timeout_s: float) -> object:
        threading.Thread(target=os.kill, args=(os.getpid(), number)).start()
        return gather(server, timeout_s)

    monkeypatch.setattr(RendezvousServer, "gather", gather_and_be_signalled)
    task = task_from({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, port=0)
    before = signal.getsignal(number)
    with pytest.raises(
        JobError, match=f"^rank 0 was ended by {number.name} while its job did not run$"
    ) as caught:
        take_part(task, b"k" * 64, 60.0, lambda site: 0)
    assert caught.value.exit_code == 128 + number
    assert signal.getsignal(number) is before


def test_rank_0_that_waits_in_vain_names_who_is_missing_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    task = task_from({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, port=0)
    with pytest.raises(
        JobError, match=r"^of 2 tasks these did not join at \S+ within 2 s: rank 1$"
    ):
        take_part(task, b"k" * 64, 2.0, lambda site: 0)
    assert capfd.readouterr().err == ""
