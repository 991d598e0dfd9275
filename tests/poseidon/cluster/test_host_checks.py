"""What hosts are asked before a job starts: every obstacle has its sentence, and all hosts' come
at once.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from poseidon.cluster import host_probe
from poseidon.cluster.agent.messages import Service
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial.channel import QueueChannel
from poseidon.cluster.dial.dialer import dial_here
from poseidon.cluster.host_checks import check_hosts
from poseidon.cluster.host_probe import (
    PORT_REMEDY,
    Check,
    HostNeeds,
    NeededFile,
    answer,
    port_problem,
)
from poseidon.cluster.jobs.registry import Registry
from poseidon.errors import JobError
from ps_server.json_fields import fields_of, plain, value_of
from tests.support.jobs import job_that_listens

HERE = HostNeeds(id=0, addresses=("127.0.0.1",))


def _problems(needs: HostNeeds, *, space_bytes: int = 0, job: str = "") -> Sequence[str]:
    check = Check(space_bytes=space_bytes, clients=(needs,), job=job)
    return answer(value_of(Check, json.loads(json.dumps(fields_of(check), default=plain)))).problems


def test_nothing_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "db_1").touch()
    needs = replace(
        HERE,
        ports=(0,),
        folders=(str(tmp_path / "not" / "yet"),),
        prefixes=((str(tmp_path / "snap"), "."),),
        files=(
            NeededFile(name="db", folder=str(tmp_path), instead=("db_1",)),
            NeededFile(name=sys.executable, folder="."),
        ),
        modules=("json",),
        runs="json.tool",
    )
    assert _problems(needs) == ()
    assert list(tmp_path.iterdir()) == [tmp_path / "db_1"]


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        (replace(HERE, addresses=("192.0.2.1", "no.such.host.invalid")), "none of 192.0.2.1, "
"no.such.host.invalid is an"),
        (replace(HERE, folders=("/proc/version/out",)), "/proc/version is not a folder"),
        (replace(HERE, prefixes=(("/proc/version/snap", "."),)), "cannot write to "
"/proc/version"),
        (replace(HERE, files=(NeededFile(name="/no/db", folder="."),)), "there is no /no/db"),
        (replace(HERE, files=(NeededFile(name="/no/db", folder=".", instead=("db", "db_0")),)), "no /no/db or /no/db_0"),
        (replace(HERE, modules=("no_such_module", "no.such.module")), "no Python module "
"no_such_module"),
        (replace(HERE, runs="json.nosuch"), "-m json.nosuch: Python finds no such module in /"),
        (replace(HERE, devices=(4711,)), "there is no GPU 4711"),
    ],
)  # fmt: skip
def test_obstacles(needs: HostNeeds, words: str) -> None:
    assert words in " | ".join(_problems(needs))


@pytest.mark.parametrize(
    ("visible", "there", "count"),
    [
        ("0,1", 4, 2),
        ("3,0,2", 4, 3),
        ("0,4,1", 4, 1),
        ("-1", 4, 0),
        ("", 4, 0),
        ("GPU-8932f937, 2", 4, 2),
        ("MIG-GPU-8932f937/1/2,MIG-GPU-8932f937/2/2", 2, 1),
        ("GPU-8932f937", 0, 0),
    ],
)
def test_gpus_are_those_that_cuda_shows(
    visible: str, there: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [f"nvidia{number}" for number in range(there)] + ["nvidiactl", "null"]
    monkeypatch.setattr(host_probe.os, "listdir", lambda _: files)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    problems: list[str] = []
    host_probe._check_devices([replace(HERE, devices=(count,))], problems)
    assert problems[0].startswith(
        f"there is no GPU {count}: {count} found by CUDA_VISIBLE_DEVICES="
    )
    if count:
        problems.clear()
        host_probe._check_devices([replace(HERE, devices=(count - 1,))], problems)
        assert not problems


def test_windows_shows_no_gpu_of_its_driver_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_probe.os, "listdir", lambda _: ["dxg", "null"])
    problems: list[str] = []
    host_probe._check_devices([replace(HERE, devices=(0,))], problems)
    assert not problems


def test_a_process_that_may_not_have_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 144))
    assert _problems(replace(HERE, peers=20)) == ()
    (problem,) = _problems(replace(HERE, peers=21))
    assert "opens up to 148 files and connections, but may open 144; raise the hard" in problem


def test_a_missing_part_of_data_that_are_there_undivided(tmp_path: Path) -> None:
    (tmp_path / "db").touch()
    (problem,) = _problems(
        replace(HERE, files=(NeededFile(name="db", folder=str(tmp_path), instead=("db_1",)),))
    )
    assert problem == (
        f"there is no {tmp_path}/db_1; write shared_file_system: true if all clients can read "
        f"{tmp_path}/db"
    )


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (problem,) = _problems(replace(HERE, ports=(port,)))
    assert problem == f"port {port} of 127.0.0.1 cannot be used: {os.strerror(98)}; {PORT_REMEDY}"
    assert "or 0" in PORT_REMEDY


@pytest.mark.processes
def test_a_port_that_another_job_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path))
    with job_that_listens(tmp_path, "quick-1") as port:
        taken = f"port {port} of 127.0.0.1 cannot be used: {os.strerror(98)} by the running job quick-1; {PORT_REMEDY}"
        assert _problems(replace(HERE, ports=(port,))) == (taken,)
        assert port_problem("localhost", port) == taken.replace("127.0.0.1", "localhost")
        assert _problems(replace(HERE, ports=(port,)), job="quick-1") == (
            f"port {port} of 127.0.0.1 cannot be used: earlier processes of this job still run on "
            "this host; it can take part when they have ended",
        )
        (Registry(tmp_path).folder / "quick-1.json").write_text("{")
        (problem,) = _problems(replace(HERE, ports=(port,)))
    assert problem.endswith(f"{os.strerror(98)}; {PORT_REMEDY}")


def test_a_full_disk(tmp_path: Path) -> None:
    (problem,) = _problems(replace(HERE, folders=(str(tmp_path),)), space_bytes=1 << 60)
    assert f"MiB are free for {tmp_path}; expected {1 << 40} MiB" in problem


def test_a_name_of_this_host_on_loopback_only_is_no_address_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(name: str, *rest: object, **more: object) -> Sequence[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert "none of node0 is an address" in _problems(replace(HERE, addresses=("node0",)))[0]


def test_the_address_that_ssh_came_to_counts_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "127.0.0.1 1 127.0.0.1 22")
    assert _problems(replace(HERE, addresses=("a-name-of-ssh-config.invalid",))) == ()


class FakeAgent(RemoteAgent):
    """An agent that answers what it is told to."""

    def __init__(self, label: str, answer: Mapping[str, object] | JobError) -> None:
        super().__init__(QueueChannel.pair()[0], label)
        self._outcome = answer

    def ask(
        self, service: Service, request: Mapping[str, object], timeout_s: float = 0.0
    ) -> Mapping[str, object]:
        assert service is Service.CHECK and timeout_s > 0
        if isinstance(self._outcome, JobError):
            raise self._outcome
        return self._outcome


def _facts(torch: str, *problems: str) -> Mapping[str, object]:
    return {"torch": torch, "addresses": {"1": "10.0.0.2"}, "problems": list(problems)}


def test_an_agent_answers_for_all_clients_of_its_host() -> None:
    agent = dial_here("ml@node0")
    needs = (HERE, HostNeeds(id=3, addresses=("localhost",)))
    assert check_hosts([(agent, Check(clients=needs))]) == {0: "127.0.0.1", 3: "127.0.0.1"}
    spoilt = replace(HERE, folders=("/proc/version/out",))
    with pytest.raises(JobError) as caught:
        check_hosts([(agent, Check(clients=(spoilt,)))])
    assert str(caught.value).startswith("ml@node0: cannot write to /proc/version/out")
    agent.close()


def test_all_hosts_problems_come_at_once() -> None:
    agents = [
        FakeAgent("ml@node0", _facts("2.6.0+cpu")),
        FakeAgent(
            "ml@node1", _facts("2.7.0\x1b[2J", "there is no /db_1", "port 5\n is \x1b[2Jtaken")
        ),
        FakeAgent("ml@node2", {"torch": "2.6.0"}),
        FakeAgent("ml@node3", JobError("ml@node3: no answer within 60 s")),
        FakeAgent("ml@node4", {**_facts("2.6.0"), "addresses": ["10.0.0.2"]}),
        FakeAgent("ml@node5", _facts("2.6.0+cu124")),
        FakeAgent("ml@node6", _facts("", "/usr/bin/python3 has no torch")),
    ]
    with pytest.raises(JobError) as caught:
        check_hosts([(agent, Check(clients=(HERE,))) for agent in agents])
    first, *lines = str(caught.value).split("\n")
    assert first == "7 problems on the 7 hosts:"
    assert lines == [
        "  ml@node1: there is no /db_1",
        r"  ml@node1: port 5\n is \x1b[2Jtaken",
        "  ml@node2: its answer cannot be read: {'torch': '2.6.0'} (HostFacts has no addresses)",
        "  ml@node3: no answer within 60 s",
        lines[4],
        "  ml@node6: /usr/bin/python3 has no torch",
        r"  ml@node1: torch 2.7.0\x1b[2J is installed there, and 2.6.0 on ml@node0; install "
        r"the same version",
    ]
    assert lines[4].startswith("  ml@node4: its answer cannot be read: {'torch': '2.6.0'")


def test_an_agent_imports_no_torch() -> None:
    """It would take seconds, and memory, on every host."""
    program = "import sys, poseidon.cluster.agent.__main__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_the_doctor_describes_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver's program, which a script stands in for; torch sees no GPU here."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase $1 in topo) echo "GPU0 X NV18";; *) echo "H100, 80 GiB, 570.1";; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = host_probe._description(Check(describe=True, folder=str(tmp_path)))
    assert found["gpus"] == ["H100, 80 GiB, 570.1"]
    assert found["gpu_system"]["topology"] == ["GPU0 X NV18"]
    assert found["gpu_system"]["copies"] == []
