"""Wrong machinefiles, keys, hosts, permissions, ports and versions: one clear sentence each, and
nothing is started.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from poseidon.cli.main import main
from tests.support.ssh_hosts import SshHosts, clean_environment

pytestmark = pytest.mark.timeout(150)

NET = """
name: "small"
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 2 dim: 3 } shape { dim: 2 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
WITH_DATA = """
layer { name: "data" type: "Data" top: "data" top: "label"
  data_param { source: "/root/data/db" backend: LMDB batch_size: 2 shared_file_system: false } }
"""
SOLVER = 'net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 2 snapshot_prefix: "snap"\n'


def write_definitions(folder: Path) -> None:
    (folder / "net.prototxt").write_text(NET)
    (folder / "solver.prototxt").write_text(SOLVER)


def train(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Start a job that cannot start. Return the error message."""
    code = main(["train", "--solver=solver.prototxt", "--hostfile=hosts", "--output=out", *words])
    said = capsys.readouterr().err
    assert code in (1, 2), said
    assert "Traceback" not in said
    assert said.startswith("poseidon train: ")
    return said.removeprefix("poseidon train: ").strip()


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the command: definitions, and a home of its own."""
    write_definitions(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path


@dataclass(frozen=True, slots=True)
class Case:
    """A mistake: options after both lines of the machinefile, or a preparation; and the message."""

    name: str
    sentence: str
    words: str = ""
    spoil: Callable[[SshHosts, Path], AbstractContextManager[object]] = lambda hosts, desk: (
        nullcontext()
    )
    both: bool = False
    """True if the first host, which is correct, takes part."""


def rewrite(path: str, text: str) -> Callable[[SshHosts, Path], AbstractContextManager[object]]:
    """Write a file of the desk's home; the home is each test's own."""

    def spoil(hosts: SshHosts, desk: Path) -> AbstractContextManager[object]:
        filled = text.format(first=hosts[0].address, host=hosts[1].address, key=hosts[0].host_key)
        (desk / "home" / ".ssh" / path).write_text(filled)
        return nullcontext()

    return spoil


@contextmanager
def taken_port(hosts: SshHosts, desk: Path) -> Iterator[None]:
    program = "import socket; s = socket.create_server(('', 9000)); print('there', flush=True); s.accept()"
    words = hosts[1].command([sys.executable, "-c", program])
    with subprocess.Popen(words, env=clean_environment(), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield
        finally:
            for process in hosts[1].processes():
                process.kill()


def on_host(files: dict[str, str]) -> Callable[[SshHosts, Path], AbstractContextManager[object]]:
    """Put files into the second host's home while the case runs."""

    @contextmanager
    def spoil(hosts: SshHosts, desk: Path) -> Iterator[None]:
        for name, text in files.items():
            path = hosts[1].outside(f"/root/{name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        try:
            yield
        finally:
            for name in {name.partition("/")[0] for name in files}:
                top = hosts[1].outside(f"/root/{name}")
                shutil.rmtree(top) if top.is_dir() else top.unlink()

    return spoil


def data_that_is_not_there(hosts: SshHosts, desk: Path) -> AbstractContextManager[object]:
    net = NET[: NET.index("layer")] + WITH_DATA + NET[NET.index('layer { name: "ip"') :]
    (desk / "net.prototxt").write_text(net)
    hosts[0].outside("/root/data/db_0").mkdir(parents=True, exist_ok=True)
    return nullcontext()


INSTALLED_THERE = f"""#!/bin/sh
PYTHONPATH="$HOME/old:$PYTHONPATH" exec {sys.executable} "$@"
"""
"""An interpreter that has other packages than the launcher's."""


TORCH = {
    "old/torch-9.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n",
    "old/python": INSTALLED_THERE,
}
IN_THE_WAY = {"out": "a file\n"}

CASES = [
    Case(
        "unknown host key",
        "{host}: .*SHA256:.*echo '{host} ssh-ed25519 .*known_hosts",
        spoil=rewrite("known_hosts", "{first} {key}\n"),
    ),
    Case(
        "file in the way",
        "{host}: cannot write to /root/out.*not a folder",
        spoil=on_host(IN_THE_WAY),
    ),
    Case(
        "port taken",
        "{host}: port 9000 of {host} cannot be used: Address already in use",
        spoil=taken_port,
        both=True,
    ),
    Case(
        "another torch",
        "torch .* is installed there, and .* on .*; install the same version",
        words="python=~/old/python",
        spoil=on_host(TORCH),
        both=True,
    ),
    Case("no data", "{host}: there is no /root/data/db_1", spoil=data_that_is_not_there, both=True),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with SshHosts(tmp_path_factory.mktemp("wrong"), 2) as hosts:
        yield hosts


@pytest.mark.needs("hosts")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hosts(hosts: SshHosts, desk: Path, capsys: pytest.CaptureFixture[str], case: Case) -> None:
    shutil.copytree(hosts.home, desk / "home")
    first, second = hosts[0].address, hosts[1].address
    right, wrong = f"{first} 9000", f"{second} 9000 {case.words}"
    (desk / "hosts").write_text(f"0 {right}\n1 {wrong}\n" if case.both else f"0 {wrong}\n")
    with case.spoil(hosts, desk):
        said = train(capsys)
    expected = case.sentence.format(first=re.escape(first), host=re.escape(second))
    assert re.search(expected, said), said
    for host in hosts:
        assert host.processes() == []


@pytest.mark.needs("hosts")
def test_the_problems_of_all_hosts_are_reported_at_once(
    hosts: SshHosts, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(hosts.home, desk / "home")
    first, second = hosts[0].address, hosts[1].address
    (desk / "hosts").write_text(
        f"0 {first} 9000 python=/bin/false\n1 {second} 9000 workdir=/absent\n"
    )
    said = train(capsys).splitlines()
    assert said[0] == "2 problems on the 2 hosts:"
    assert [place for place in (first, second) if any(place in line for line in said[1:])] == [
        first,
        second,
    ]
    assert len(said) == 3
