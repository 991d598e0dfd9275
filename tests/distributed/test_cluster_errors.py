"""Wrong machinefiles, keys, hosts, permissions, ports and versions: one clear sentence each, and
nothing is started.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import threading
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


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "hosts: there is no such machinefile"),
        (b"\xff\xfe0 h 1", "hosts: a machinefile is UTF-8 text"),
        (b"# nobody\n", "hosts: no client found"),
        (b"0 h", "hosts:1: expected '<id> <host> <port>'"),
        (b"0 h 9000\n\nx h 9100", "hosts:3: the client id must be a whole number"),
        (b"0 h 9000\n0 i 9000", "hosts:2: client 0 is already on line 1"),
        (b"0 h 9000\n2 i 9000", "hosts:2: .* 1 is missing"),
        (b"0 h ninety", "hosts:1: the port must be a whole number"),
        (b"0 h 65536", r"hosts:1: the port must be .*\(0 to 65535\)"),
        (b"0 h 9000\n1 h 9000", "hosts:2: clients 0 and 1 on h share port 9000"),
        (b"0 1.2.3.444 9000", "hosts:1: '1.2.3.444' is not an IPv4 address"),
        (b"0 fd00:::1 9000", "hosts:1: 'fd00:::1' is not an IPv6 address"),
        (b"0 -oProxyCommand=reboot 9000", "hosts:1: .* is neither a host name nor an address"),
        (b"0 h;reboot 9000", "hosts:1: .* is neither a host name nor an address"),
        (b"0 h 9000 usr=ml", "hosts:1: unknown word 'usr=ml'; did you mean 'user='"),
        (b"0 h 9000 user=-lroot", "hosts:1: 'user=-lroot' is not a user name"),
        (b"0 h 9000 ssh_port=0", "hosts:1: ssh_port must be a port from 1"),
        (b"0 h 9000 gpus=0,0", "hosts:1: 'gpus=0,0' lists a device twice"),
        (b"0 h 9000 python=$(reboot)", "hosts:1: 'python=.*': expected a path"),
        (b"0 h 9000 workdir=../x", "hosts:1: 'workdir=.*': expected a path"),
        (b"0 h 9000 role=boss", "hosts:1: 'role=boss' is not a role"),
        (b"0 h 9000 role=server", "hosts: every client has role=server"),
    ],
)
def test_machinefiles(
    desk: Path, capsys: pytest.CaptureFixture[str], text: bytes | None, sentence: str
) -> None:
    if text is not None:
        (desk / "hosts").write_bytes(text)
    said = train(capsys)
    assert re.match(sentence, said)
    assert "\n" not in said


@dataclass(frozen=True, slots=True)
class Case:
    """A mistake: options after both lines of the machinefile, or a preparation; and the message."""

    name: str
    sentence: str
    words: str = ""
    spoil: Callable[[SshHosts, Path], AbstractContextManager[object]] = lambda hosts, desk: (
        nullcontext()
    )
    host: str = ""
    """Instead of the second host's address."""
    both: bool = False
    """True if the first host, which is correct, takes part."""


def rewrite(path: str, text: str) -> Callable[[SshHosts, Path], AbstractContextManager[object]]:
    """Write a file of the desk's home; the home is each test's own."""

    def spoil(hosts: SshHosts, desk: Path) -> AbstractContextManager[object]:
        filled = text.format(first=hosts[0].address, host=hosts[1].address, key=hosts[0].host_key)
        (desk / "home" / ".ssh" / path).write_text(filled)
        return nullcontext()

    return spoil


def no_key(hosts: SshHosts, desk: Path) -> AbstractContextManager[object]:
    (desk / "home" / ".ssh" / "id_ed25519").unlink()
    return nullcontext()


def passphrase(hosts: SshHosts, desk: Path) -> AbstractContextManager[object]:
    key = desk / "home" / ".ssh" / "id_ed25519"
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-N", "a secret", "-f", key], check=True, capture_output=True
    )
    return nullcontext()


@contextmanager
def not_authorized(hosts: SshHosts, desk: Path) -> Iterator[None]:
    path = hosts[1].outside("/root/.ssh/authorized_keys")
    kept = path.read_bytes()
    path.write_bytes(b"")
    try:
        yield
    finally:
        path.write_bytes(kept)


@contextmanager
def keys_that_all_can_write(hosts: SshHosts, desk: Path) -> Iterator[None]:
    path = hosts[1].outside("/root/.ssh/authorized_keys")
    path.chmod(0o666)
    try:
        yield
    finally:
        path.chmod(0o600)


@contextmanager
def down(hosts: SshHosts, desk: Path) -> Iterator[None]:
    hosts[1].crash()
    try:
        yield
    finally:
        hosts[1].start()
        hosts[1].wait_until_up()


@contextmanager
def something_else(hosts: SshHosts, desk: Path) -> Iterator[None]:
    """Run a server of a different kind at the test's address."""
    with socket.create_server((hosts.address, 0)) as server:
        server.settimeout(20)

        def answer() -> None:
            with server.accept()[0] as peer:
                peer.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n" * 200)

        thread = threading.Thread(target=answer)
        thread.start()
        (desk / "hosts").write_text(f"0 {hosts.address} 9000 ssh_port={server.getsockname()[1]}\n")
        try:
            yield
        finally:
            thread.join()


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


def installed(name: str, text: str) -> dict[str, str]:
    """Return the files of a host whose interpreter, python=~/old/python, has this file among its
    packages.
    """
    return {f"old/{name}": text, "old/python": INSTALLED_THERE}


OLD = installed("poseidon/__init__.py", '__version__ = "0.0.1"\n')
BROKEN = installed("poseidon/__init__.py", 'raise RuntimeError("half installed")\n')
TORCH = installed(
    "torch-9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n"
)
CHATTY = {"bin/python": "#!/bin/sh\necho hello\n"}
IN_THE_WAY = {"out": "a file\n"}

CASES = [
    Case(
        "unknown host key",
        "{host}: .*SHA256:.*echo '{host} ssh-ed25519 .*known_hosts",
        spoil=rewrite("known_hosts", "{first} {key}\n"),
    ),
    Case(
        "changed host key",
        "{host}: .*SHA256:.*ssh-keygen -R",
        spoil=rewrite("known_hosts", "{first} {key}\n{host} {key}\n"),
    ),
    Case("no key", "{host}: it accepts none of our keys .there is none.", spoil=no_key),
    Case(
        "key with a passphrase",
        "{host}: it accepts none of our keys .*passphrase",
        spoil=passphrase,
    ),
    Case(
        "no private key",
        "{host}: it accepts none of our keys",
        spoil=rewrite("id_ed25519", "not a key\n"),
    ),
    Case(
        "key not authorized",
        "{host}: it accepts none of our keys .*refused.*ssh-copy-id",
        spoil=not_authorized,
    ),
    Case(
        "authorized_keys open to all",
        "{host}: it accepts none of our keys .*refused",
        spoil=keys_that_all_can_write,
    ),
    Case("unknown user", "nobody7@.*{host}: .*it accepts none of our keys", words="user=nobody7"),
    Case(
        "unknown name", "node7.invalid: the name node7.invalid is not known", host="node7.invalid"
    ),
    Case("host down", "{host}: cannot be reached: Connection refused", spoil=down),
    Case("wrong SSH port", "{host}:9: cannot be reached: Connection refused", words="ssh_port=9"),
    Case("another server", "no SSH server that we can use", spoil=something_else),
    Case(
        "jump host refuses",
        "{first}:9: cannot be reached",
        spoil=rewrite("config", "Host {host}\n  ProxyJump {first}:9\n"),
    ),
    Case(
        "configuration",
        "home/.ssh/config.*: .*{host}",
        spoil=rewrite("config", "Host {host}\n  Port ssh\n"),
    ),
    Case("no such folder", "{host}: .*(/absent|status 125)", words="workdir=/absent"),
    Case(
        "folder that takes nothing",
        "{host}: nothing can be written to /proc/",
        words="workdir=/proc/sys",
    ),
    Case(
        "file in the way",
        "{host}: nothing can be written to /root/out.*not a folder",
        spoil=on_host(IN_THE_WAY),
    ),
    Case(
        "port taken",
        "{host}: port 9000 of {host} cannot be used: Address already in use",
        spoil=taken_port,
        both=True,
    ),
    Case("no such Python", "{host}: .*status 127", words="python=/absent/python"),
    Case("no Python at all", "{host}: .*status 1", words="python=/bin/false"),
    Case(
        "Python that talks",
        "{host}: what answers there is not an agent of Poseidon: b'hello",
        words="python=~/bin/python",
        spoil=on_host(CHATTY),
    ),
    Case(
        "another version",
        "{host}: Poseidon 0.0.1 is installed there, and .* here",
        words="python=~/old/python",
        spoil=on_host(OLD),
    ),
    Case(
        "broken installation",
        "{host}: .* has no Poseidon .half installed.",
        words="python=~/old/python",
        spoil=on_host(BROKEN),
    ),
    Case(
        "another torch",
        "torch .* is installed there, and .* on .*; install the same version",
        words="python=~/old/python",
        spoil=on_host(TORCH),
        both=True,
    ),
    Case("no data", "{host}: there is no /root/data/db_1", spoil=data_that_is_not_there, both=True),
    Case("no GPU", "{host}: .*GPU", words="gpus=7"),
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
    right, wrong = f"{first} 9000", f"{case.host or second} 9000 {case.words}"
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
