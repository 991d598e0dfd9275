"""What hosts are asked before a job starts: every obstacle has its sentence, and all hosts' come
at once.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from poseidon import __version__
from poseidon.cluster import host_checks
from poseidon.cluster.host_checks import HostCheck, HostNeeds, NeededFile, check_hosts
from poseidon.cluster.host_probe import PORT_REMEDY, answer, port_problem
from poseidon.cluster.jobs.registry import Registry
from poseidon.cluster.ssh.channel import Finished
from poseidon.errors import JobError
from tests.support.jobs import job_that_listens

HERE = HostNeeds(id=0, addresses=("127.0.0.1",))


def _problems(needs: HostNeeds, *, version: str = __version__, space_bytes: int = 0) -> list[str]:
    asked = {"poseidon": version, "space_bytes": space_bytes, "clients": [needs.to_fields()]}
    found = answer(json.loads(json.dumps(asked)))["problems"]
    assert isinstance(found, list)
    return found


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
    )
    assert _problems(needs) == []
    assert list(tmp_path.iterdir()) == [tmp_path / "db_1"]


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        (replace(HERE, addresses=("192.0.2.1", "no.such.host.invalid")), "none of 192.0.2.1, "
"no.such.host.invalid is an"),
        (replace(HERE, folders=("/proc/version/out",)), "/proc/version is not a folder"),
        (replace(HERE, prefixes=(("/proc/version/snap", "."),)), "nothing can be written to "
"/proc/version"),
        (replace(HERE, files=(NeededFile(name="/no/db", folder="."),)), "there is no /no/db"),
        (replace(HERE, files=(NeededFile(name="/no/db", folder=".", instead=("db", "db_0")),)), "no /no/db or /no/db_0"),
        (replace(HERE, modules=("no_such_module", "no.such.module")), "no Python module "
"no_such_module"),
        (replace(HERE, devices=(4711,)), "there is no GPU 4711"),
    ],
)  # fmt: skip
def test_obstacles(needs: HostNeeds, words: str) -> None:
    assert words in " | ".join(_problems(needs))


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
        assert _problems(replace(HERE, ports=(port,))) == [taken]
        assert port_problem("localhost", port, with_job=True) == taken.replace(
            "127.0.0.1", "localhost"
        )
        (Registry(tmp_path).folder / "quick-1.json").write_text("{")
        (problem,) = _problems(replace(HERE, ports=(port,)))
    assert problem.endswith(f"{os.strerror(98)}; {PORT_REMEDY}")


def test_another_version_and_a_full_disk(tmp_path: Path) -> None:
    (problem,) = _problems(HERE, version="9.9")
    assert problem == f"Poseidon {__version__} is installed there, and 9.9 here; expected the same"
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
    assert _problems(replace(HERE, addresses=("a-name-of-ssh-config.invalid",))) == []


@dataclass(slots=True)
class FakeHost:
    """Runs the probe as a child of the test, or says what it is told to."""

    label: str
    say: Callable[[bytes], Finished] | None = None
    asked: list[bytes] = field(default_factory=list)

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Finished:
        self.asked.append(stdin)
        if self.say is not None:
            return self.say(stdin)
        done = subprocess.run(
            argv, input=stdin, capture_output=True, timeout=timeout_s, check=False
        )
        return Finished(status=done.returncode, stdout=done.stdout, stderr=done.stderr)


def _question(host: FakeHost, *clients: HostNeeds) -> HostCheck:
    return HostCheck(connection=host, interpreter=(sys.executable,), needs=clients)


def _says(torch: str, *problems: str) -> Callable[[bytes], Finished]:
    facts = {
        "python": "p",
        "torch": torch,
        "addresses": {"1": "10.0.0.2"},
        "problems": list(problems),
    }
    return lambda _: Finished(
        status=0, stdout=b"a banner\n" + json.dumps(facts).encode(), stderr=b""
    )


def test_a_real_probe_is_sent_and_answers() -> None:
    host = FakeHost("ml@node0")
    found = check_hosts([_question(host, HERE, HostNeeds(id=3, addresses=("localhost",)))])
    assert found == {0: "127.0.0.1", 3: "127.0.0.1"}


def test_all_hosts_problems_come_at_once() -> None:
    def fails(stdin: bytes) -> Finished:
        return Finished(status=127, stdout=b"", stderr=b"sh: 1: \x1b[2Jpython9: not found\n")

    def breaks(stdin: bytes) -> Finished:
        raise JobError("ml@node3: the connection broke")

    hosts = [
        FakeHost("ml@node0", _says("2.6.0+cpu")),
        FakeHost(
            "ml@node1", _says("2.7.0\x1b[2J", "there is no /db_1", "port 5\n is \x1b[2Jtaken")
        ),
        FakeHost("ml@node2", fails),
        FakeHost("ml@node3", breaks),
        FakeHost("ml@node4", lambda _: Finished(status=0, stdout=b"hello", stderr=b"")),
        FakeHost("ml@node5", _says("2.6.0+cu124")),
    ]
    with pytest.raises(JobError) as caught:
        check_hosts([_question(host, HERE) for host in hosts])
    first, *lines = str(caught.value).split("\n")
    assert first == "6 problems on the 6 hosts:"
    assert lines == [
        "  ml@node1: there is no /db_1",
        r"  ml@node1: port 5\n is \x1b[2Jtaken",
        r"  ml@node2: its Python cannot be run (status 127): sh: 1: \x1b[2Jpython9: not found",
        "  ml@node3: the connection broke",
        lines[4],
        r"  ml@node1: torch 2.7.0\x1b[2J is installed there, and 2.6.0 on ml@node0; expected the "
        r"same",
    ]
    assert lines[4].startswith("  ml@node4: its answer cannot be read: b'hello'")


def test_the_probe_needs_nothing_but_the_standard_library() -> None:
    program = Path(host_checks.host_probe.__file__).read_text(encoding="utf-8")
    asked = json.dumps({"poseidon": "1", "space_bytes": 0, "clients": []})
    words = [sys.executable, "-I", "-S", "-c", program]
    done = subprocess.run(
        words, input=asked, capture_output=True, text=True, timeout=60, check=True, cwd="/"
    )
    problems = json.loads(done.stdout)["problems"]
    assert (
        "has no torch" in problems[1]
        and "has no Poseidon (No module named 'poseidon')" in problems[0]
    )
