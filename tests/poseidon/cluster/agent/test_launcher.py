"""Agents behind a real sshd: started at once, heard, and gone when the launcher or the line
goes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import create_autospec

import pytest

from poseidon.cluster.agent.launcher import HostEnvironment, RemoteChannel, _StderrTail, open_agents
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, record_fields
from poseidon.cluster.machinefile import Host
from poseidon.cluster.plan import ProcessName, Role
from poseidon.cluster.process import ProcessSpec
from poseidon.cluster.remote_python import LauncherEnvironment, RemotePython
from poseidon.cluster.ssh.config import SshSettings
from poseidon.cluster.ssh.connections import SshConnection, connect
from poseidon.errors import JobError
from tests.support.job_child import ENDLESS_WORKER, child
from tests.support.live_processes import none_left
from tests.support.loopback_sshd import LoopbackSshd
from tests.support.recording_listener import RecordingListener

pytestmark = [pytest.mark.needs("sshd"), pytest.mark.processes]
ROOT = Path(__file__).parents[4]
CLIENTS = [Host(id=0, address="127.0.0.1", port=0), Host(id=1, address="127.0.0.1", port=0)]
JOB = "ssh-20260101-000000-abcdef"
OWN = LauncherEnvironment(python=sys.executable, checkout=str(ROOT), folder=str(ROOT))
RECORD = record_fields(
    JobRecord(
        job=JOB,
        launcher=RecordedProcess(name="launcher", host="127.0.0.1", pid=1, created_s=0.0),
        hostfile=None,
        hosts=tuple(CLIENTS),
        output="/output",
        started_s=1.0,
    )
)


def _name(client: Host) -> ProcessName:
    return ProcessName(role=Role.WORKER, index=client.id, client=client.id, host=client.address)


def test_processes_of_two_clients_behind_one_agent(
    sshd: LoopbackSshd, host: SshConnection, tmp_path: Path
) -> None:
    place = HostEnvironment(connection=host, python=RemotePython(launcher=OWN))
    launcher = open_agents({0: place, 1: place}, RECORD, JOB)
    try:
        pids = []
        for client in CLIENTS:
            listener = RecordingListener()
            spec = ProcessSpec(name=_name(client), argv=child(ENDLESS_WORKER), first_line=b"{}")
            pids.append(launcher.start(spec, client, listener).pid)
            listener.until("ready")
        assert Path(launcher.scratch(CLIENTS[1])).is_dir()
        words = ("import os, sys; print(os.getcwd(), sys.executable, sep='|')",)
        listener = RecordingListener()
        launcher.start(
            ProcessSpec(
                name=_name(CLIENTS[0]), argv=(sys.executable, "-c", *words), first_line=b""
            ),
            CLIENTS[0],
            listener,
        )
        assert ("log", f"{ROOT}|{sys.executable}") in listener.until("exited")
    finally:
        launcher.close()
        launcher.close()
    assert none_left(pids)
    assert not Path(launcher.scratch(CLIENTS[1])).exists()


def test_a_line_that_breaks_ends_both_sides(sshd: LoopbackSshd, tmp_path: Path) -> None:
    host = connect(CLIENTS[0], SshSettings(config=sshd.config))
    launcher = open_agents(
        {0: HostEnvironment(connection=host, python=RemotePython(launcher=OWN))}, RECORD, JOB
    )
    listener = RecordingListener()
    spec = ProcessSpec(name=_name(CLIENTS[0]), argv=child(ENDLESS_WORKER), first_line=b"{}")
    process = launcher.start(spec, CLIENTS[0], listener)
    listener.until("ready")
    sshd.break_lines()
    *_, (kind, event), _ = listener.until("exited")
    assert (
        kind == "error" and isinstance(event, dict) and "the channel to it" in str(event["message"])
    )
    assert none_left([process.pid])
    launcher.close()
    host.close()


@pytest.mark.parametrize(
    ("python", "folder", "words"),
    [
        ("/no/such/python", None, "not found"),
        (None, "/no/such/folder", "/no/such/folder"),
        ("/bin/false", None, "the channel to it has ended"),
        ("/bin/echo", None, "is not an agent of this job"),
    ],
)
def test_what_is_no_agent(
    host: SshConnection, python: str | None, folder: str | None, words: str
) -> None:
    with pytest.raises(JobError) as caught:
        open_agents(
            {
                0: HostEnvironment(
                    connection=host,
                    python=RemotePython(launcher=OWN, python=python, workdir=folder),
                )
            },
            RECORD,
            JOB,
        )
    assert words in str(caught.value)
    assert str(caught.value).startswith(host.label)


def test_an_end_of_standard_error_that_cannot_be_read_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    channel = create_autospec(RemoteChannel, instance=True)
    channel.receive_error.side_effect = [b"ImportError: no torch", ValueError("I/O on closed file")]
    assert _StderrTail(channel, "ml@node3").last_line() == "ImportError: no torch"
    assert caplog.messages == [
        "ml@node3: the agent's standard error cannot be read: ValueError('I/O on closed file')"
    ]
