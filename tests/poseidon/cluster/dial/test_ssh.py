"""Agents behind a real sshd on this machine: who is let in, who is refused and in which words; gone
when the launcher or the connection goes.
"""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import paramiko
import psutil
import pytest

from poseidon import __version__
from poseidon.cluster.agent.messages import Service
from poseidon.cluster.agent.remote import AgentTimeouts, RemoteAgent
from poseidon.cluster.dial import ssh
from poseidon.cluster.dial.ssh import (
    SshDialer,
    _StderrTail,
    _why_ended,
    close_agents,
    dial_all,
    dial_each,
    names_of,
    opened,
)
from poseidon.cluster.host_checks import check_hosts
from poseidon.cluster.host_probe import Check, HostNeeds
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.machinefile import Host, SshSettings
from poseidon.cluster.process import ProcessSpec
from poseidon.cluster.python_command import LauncherEnvironment
from poseidon.errors import JobError
from tests.support.job_child import ENDLESS_WORKER, child
from tests.support.live_processes import none_left
from tests.support.loopback_sshd import LoopbackSshd, make_key
from tests.support.polling import until
from tests.support.recording_listener import RecordingListener

pytestmark = [pytest.mark.needs("sshd"), pytest.mark.processes]
RELAY = """
import os, select, socket, sys
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while True:
    for source in select.select([0, line], [], [])[0]:
        data = os.read(0, 65536) if source == 0 else line.recv(65536)
        if not data:
            sys.exit()
        line.sendall(data) if source == 0 else os.write(1, data)
"""
ROOT = Path(__file__).parents[4]
HERE = Host(id=0, address="127.0.0.1", port=0)
OWN = LauncherEnvironment(python=sys.executable, checkout=str(ROOT), folder=str(ROOT))


def _label(sshd: LoopbackSshd) -> str:
    return f"{getpass.getuser()}@127.0.0.1:{sshd.port}"


def _dial(config: Path, host: Host = HERE, timeout_s: float = 15.0) -> RemoteAgent:
    return dial_all([host], SshSettings(config=config, connect_timeout_s=timeout_s), OWN)[host.id]


def _spec(*argv: str) -> ProcessSpec:
    name = ProcessName(role=Role.WORKER, index=0, client=0, host="127.0.0.1")
    return ProcessSpec(name=name, argv=argv, first_line=b"{}")


@pytest.fixture
def agent(sshd: LoopbackSshd) -> Iterator[RemoteAgent]:
    dialled = _dial(sshd.config)
    yield dialled
    dialled.close()


def _refused(config: Path, host: Host = HERE, timeout_s: float = 15.0) -> str:
    with pytest.raises(JobError) as caught:
        _dial(config, host, timeout_s)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _changed(sshd: LoopbackSshd, folder: Path, *changes: tuple[str, str]) -> Path:
    text = sshd.config.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "config").write_text(text)
    return folder / "config"


def test_processes_of_two_hosts_behind_one_agent(sshd: LoopbackSshd) -> None:
    hosts = [Host(id=number, address="127.0.0.1", port=0) for number in range(2)]
    agents = dial_all(hosts, SshSettings(config=sshd.config), OWN)
    agent = agents[0]
    assert agents == {0: agent, 1: agent}
    pids = []
    for _ in hosts:
        listener = RecordingListener()
        pids.append(agent.start(_spec(*child(ENDLESS_WORKER)), listener).pid)
        listener.until("ready")
    assert Path(agent.welcome.scratch).is_dir()
    words = "import os, sys; print(os.getcwd(), sys.executable, sep='|')"
    listener = RecordingListener()
    agent.start(_spec(sys.executable, "-c", words), listener)
    assert ("log", f"{ROOT}|{sys.executable}") in listener.until("exited")
    agent.close()
    agent.close()
    assert none_left(pids)
    assert not Path(agent.welcome.scratch).exists()


def test_hosts_that_differ_have_agents_of_their_own(sshd: LoopbackSshd, tmp_path: Path) -> None:
    odd = tmp_path / "it's $HOME `id` a;b \\ !"
    odd.mkdir()
    hosts = [HERE, Host(id=1, address="127.0.0.1", port=0, workdir=str(odd))]
    agents = dial_all(hosts, SshSettings(config=sshd.config), OWN)
    assert len(set(agents.values())) == 2
    for host, folder in ((0, ROOT), (1, odd)):
        listener = RecordingListener()
        script = "say('runs', folder=os.getcwd())"
        agents[host].start(_spec(*child(script)), listener)
        assert listener.until("runs")[-1][1] == {"event": "runs", "folder": str(folder)}
    close_agents(agents.values())


def test_the_agent_has_the_mark_of_its_job(sshd: LoopbackSshd) -> None:
    dialer = SshDialer(SshSettings(config=sshd.config), OWN)
    (agent,) = opened(dialer.dial([HERE], "far-1")).values()
    listener = RecordingListener()
    parent = psutil.Process(agent.start(_spec(*child(ENDLESS_WORKER)), listener).pid).parent()
    words = parent.cmdline() if parent is not None else []
    agent.close()
    assert "poseidon.cluster.agent" in words and words[-2:] == ["--job", "far-1"]


def test_files_pass_as_they_are(agent: RemoteAgent, tmp_path: Path) -> None:
    content, parts = os.urandom(3_000_000), list[bytes]()
    (tmp_path / "here").write_bytes(content)
    there = tmp_path / os.fsdecode(b"caf\xe9")
    agent.send_file(tmp_path / "here", str(there), 0, lambda _: None)
    assert there.read_bytes() == content
    assert agent.read_file(str(there), parts.append) == len(content)
    assert b"".join(parts) == content


def test_a_host_is_checked_over_the_same_connection(agent: RemoteAgent) -> None:
    needs = HostNeeds(id=0, addresses=("a-name-of-ssh-config.invalid",))
    assert check_hosts([(agent, Check(clients=(needs,)))]) == {0: "127.0.0.1"}


def test_a_connection_that_breaks_ends_both_sides(sshd: LoopbackSshd) -> None:
    agent = _dial(sshd.config)
    listener = RecordingListener()
    process = agent.start(_spec(*child(ENDLESS_WORKER)), listener)
    listener.until("ready")
    sshd.break_lines()
    *_, (kind, event), _ = listener.until("exited")
    assert kind == "error" and isinstance(event, dict) and event["host_lost"]
    assert "the connection to it" in str(event["message"])
    assert none_left([process.pid])
    with pytest.raises(JobError, match="the connection to it"):
        agent.ask(Service.LINKS, {"do": "clock"})
    agent.close()


@pytest.mark.parametrize(
    ("when", "words"), [("before", "Timeout opening channel"), ("after", "no answer within 0.3 s")]
)
def test_a_server_that_falls_silent_before_the_agent_runs(
    sshd: LoopbackSshd, monkeypatch: pytest.MonkeyPatch, when: str, words: str
) -> None:
    open_session = paramiko.Transport.open_session
    with ExitStack() as stack:

        def open_and_halt(transport: paramiko.Transport, **settings: Any) -> paramiko.Channel:
            if when == "before":
                stack.enter_context(sshd.halted())
            channel = open_session(transport, **settings)
            if when == "after":
                stack.enter_context(sshd.halted())
            return channel

        monkeypatch.setattr(paramiko.Transport, "open_session", open_and_halt)
        monkeypatch.setattr(ssh, "TIMEOUTS", AgentTimeouts(hello_s=0.3))
        outcomes = dial_each([HERE], SshSettings(config=sshd.config), OWN)
    assert str(outcomes[0]).startswith(f"{_label(sshd)}: cannot start Python there: {words}")


def test_a_connection_that_has_ended_is_called_broken(
    sshd: LoopbackSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object, **__: object) -> None:
        raise EOFError  # the other end has hung up; paramiko says no more

    monkeypatch.setattr(paramiko.Transport, "open_session", ended)
    said = _refused(sshd.config)
    assert said == f"{_label(sshd)}: cannot start Python there: the connection broke"


@pytest.mark.parametrize("lost", [False, True])
def test_a_transport_that_is_gone_is_a_broken_channel(
    agent: RemoteAgent, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    def gone(transport: paramiko.Transport, data: object) -> None:
        raise EOFError

    monkeypatch.setattr(paramiko.Transport, "_send_user_message", gone)
    if lost:
        with pytest.raises(JobError, match="the connection to it broke"):
            agent.ask(Service.LINKS, {"do": "clock"})
    agent.close()


OLD_PYTHON = f"""#!{sys.executable}
import sys
import threading
sys.version_info = (3, 7, 1)
code, sys.argv = sys.argv[2], ["-c", *sys.argv[3:]]
exec(code)
"""
NO_POSEIDON = f"""#!/bin/sh
exec {sys.executable} -I -S "$@"
"""
OTHER_POSEIDON = f"""#!{sys.executable}
import sys
import threading
sys.path.insert(0, {str(ROOT)!r})
import poseidon
poseidon.__version__ = "9.9"
code, sys.argv = sys.argv[2], ["-c", *sys.argv[3:]]
exec(code)
"""


LOST_PYTHON = f"""#!/bin/sh
PYTHONHOME=/no/such/folder exec {sys.executable} "$@"
"""


def test_why_an_agent_cannot_run(sshd: LoopbackSshd, tmp_path: Path) -> None:
    programs = {
        "old": OLD_PYTHON,
        "none": NO_POSEIDON,
        "other": OTHER_POSEIDON,
        "lost": LOST_PYTHON,
    }
    for name, program in programs.items():
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    wrong = [
        (
            "/no/such/python",
            None,
            ": /no/such/python cannot be run on this host; set python= of this host in the "
            "machinefile to a Python 3.10 or newer",
        ),
        (str(tmp_path), None, f": {tmp_path} cannot be run on this host"),
        (None, "/no/such/folder", ": workdir=/no/such/folder does not exist on this host"),
        (
            "/bin/false",
            None,
            "its Python cannot be run (status 1",
        ),
        ("/bin/true", None, "its Python cannot be run (status 0"),
        ("/bin/echo", None, "what answers there is not an agent of Poseidon: '-c exec"),
        (f"{tmp_path}/lost", "/", "(status 1): Fatal Python error: init_fs_encoding: failed"),
        (f"{tmp_path}/old", "/", f"{sys.executable} is Python 3.7.1; expected 3.10 or newer"),
        (f"{tmp_path}/none", "/", f"{sys.executable} has no Poseidon (No module named 'poseidon')"),
        (f"{tmp_path}/other", "/", f"Poseidon 9.9 is installed there, and {__version__} here"),
    ]
    hosts = [
        replace(HERE, id=number, python=python, workdir=folder)
        for number, (python, folder, _) in enumerate(wrong)
    ]
    outcomes = dial_each(hosts, SshSettings(config=sshd.config), OWN)
    for number, (_, _, words) in enumerate(wrong):
        assert words in str(outcomes[number])
        assert str(outcomes[number]).startswith(f"{_label(sshd)}: ")


def test_an_agent_that_ends_without_a_message_says_what_may_have_ended_it() -> None:
    assert _why_ended(1, "no space") == "its Python cannot be run (status 1): no space"
    assert _why_ended(0, "").startswith(
        "its Python cannot be run (status 0, without a message): do"
    )


def test_an_end_of_standard_error_that_cannot_be_read_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    channel = create_autospec(paramiko.Channel, instance=True)
    channel.makefile_stderr.return_value.readline.side_effect = [
        b"ImportError: no torch\n",
        ValueError("I/O on closed file"),
    ]
    assert _StderrTail(channel, "ml@node3").last_line() == "ImportError: no torch"
    assert caplog.messages == [
        "ml@node3: the agent's standard error cannot be read: ValueError('I/O on closed file')"
    ]


@pytest.mark.parametrize(
    ("address", "dialled", "names"),
    [
        ("node1", "node1", ["node1", "10.0.0.1"]),
        ("node1", "10.0.0.7", ["node1", "10.0.0.7", "10.0.0.1"]),
        ("node1", "127.0.0.1", ["node1", "10.0.0.1"]),
        ("unknown", "alias", ["unknown", "alias", "10.0.0.3"]),
        ("127.0.0.1", "127.0.0.1", ["127.0.0.1"]),
    ],
)
def test_names_of_a_host(address: str, dialled: str, names: list[str]) -> None:
    known = {"node1": ("127.0.1.1", "10.0.0.1"), "alias": ("10.0.0.3",)}
    assert list(names_of(Host(id=0, address=address, port=0), dialled, known)) == names


def test_hosts_are_dialled_by_their_names_in_the_configuration(
    sshd: LoopbackSshd, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(
        "Host inner.invalid\n  HostName 10.1.2.3\n" + sshd.config.read_text()
    )
    dialer = SshDialer(SshSettings(config=tmp_path / "config"), OWN)
    host = Host(id=4, address="inner.invalid", port=0)
    assert dialer.names([host]) == {4: ("inner.invalid", "10.1.2.3")}


def test_all_problems_at_once(sshd: LoopbackSshd, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def hang_up() -> None:
            other.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        hosts = [
            HERE,
            Host(id=1, address="127.0.0.1", port=0, ssh_port=other.getsockname()[1]),
            Host(id=2, address="127.0.0.1", port=0, user="nobody-of-that-name"),
        ]
        with pytest.raises(JobError) as caught:
            dial_all(hosts, SshSettings(config=sshd.config), OWN)
    first, *problems = str(caught.value).split("\n")
    assert first == "2 problems on the 3 hosts:"
    assert "no SSH server that we can use" in problems[0]
    assert "nobody-of-that-name@127.0.0.1" in problems[1] and "was refused" in problems[1]


def test_a_server_that_says_nothing(sshd: LoopbackSshd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = Host(id=1, address="127.0.0.1", port=0, ssh_port=silent.getsockname()[1])
        with pytest.raises(JobError, match="no SSH server that we can use"):
            dial_all([host], SshSettings(config=sshd.config, connect_timeout_s=0.5), OWN)


def test_through_another_host(sshd: LoopbackSshd, tmp_path: Path) -> None:
    jump = f"Host inner\n  HostName 127.0.0.1\n  ProxyJump 127.0.0.1:{sshd.port},127.0.0.1:{sshd.port}\n"
    (tmp_path / "config").write_text(jump + sshd.config.read_text())
    agent = _dial(tmp_path / "config", Host(id=0, address="inner", port=0))
    assert agent.ask(Service.LINKS, {"do": "clock"})
    agent.close()
    before = sshd.server_config.read_text()
    sshd.server_config.write_text(before.replace("TcpForwarding yes", "TcpForwarding no"))
    try:
        with pytest.raises(JobError, match="the sshd of its jump host forwards no connections"):
            _dial(tmp_path / "config", Host(id=0, address="inner", port=0))
    finally:
        sshd.server_config.write_text(before)


def test_a_program_that_makes_the_connection(sshd: LoopbackSshd, tmp_path: Path) -> None:
    (tmp_path / "relay.py").write_text(RELAY)
    command = f"{sys.executable} {tmp_path}/relay.py {sshd.port}"
    config = _changed(sshd, tmp_path, ("  Port", f"  ProxyCommand {command}\n  Port"))
    agent = _dial(config)
    assert agent.ask(Service.LINKS, {"do": "clock"})
    agent.close()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("false", "its ProxyCommand `false` ended with exit status 1: it wrote no error"),
        ("no-such-program %h", "`no-such-program 127.0.0.1` ended with exit status 127: sh: "),
        ("sh -c 'echo it is closed >&2; kill -9 $$'", "ended with signal 9: it is closed"),
        ("echo hello", "ended with exit status 0: it wrote no error"),
    ],
)
def test_a_program_that_makes_no_connection_is_named(
    sshd: LoopbackSshd, tmp_path: Path, command: str, expected: str
) -> None:
    config = _changed(sshd, tmp_path, ("  Port", f"  ProxyCommand {command}\n  Port"))
    assert expected in _refused(config, timeout_s=1000.0)


def test_a_program_that_only_waits_is_named(sshd: LoopbackSshd, tmp_path: Path) -> None:
    config = _changed(sshd, tmp_path, ("  Port", "  ProxyCommand sleep 1000\n  Port"))
    assert "its ProxyCommand `sleep 1000` reaches no SSH server" in _refused(config, timeout_s=0.5)


def test_a_program_may_write_many_errors_and_runs_apart_from_the_terminal(
    sshd: LoopbackSshd, tmp_path: Path
) -> None:
    (tmp_path / "relay.py").write_text(
        f"import os; open({str(tmp_path / 'session')!r}, 'w').write(str(os.getsid(0)))\n"
        "os.write(2, b'debug: chatter\\n' * 10_000)\n" + RELAY
    )
    # only a shell understands it
    command = f"${{UNSET:-{sys.executable}}} {tmp_path}/relay.py {sshd.port}"
    config = _changed(sshd, tmp_path, ("  Port", f"  ProxyCommand {command}\n  Port"))
    agent = _dial(config)
    assert agent.ask(Service.LINKS, {"do": "clock"})
    agent.close()
    assert int((tmp_path / "session").read_text()) != os.getsid(0)


def test_an_unknown_host_is_refused(sshd: LoopbackSshd, tmp_path: Path) -> None:
    config = _changed(
        sshd,
        tmp_path,
        (f"UserKnownHostsFile {sshd.known_hosts}", f"UserKnownHostsFile {tmp_path}/none"),
    )
    text = _refused(config)
    assert "is not known" in text and "SHA256:" in text
    assert f"echo '[127.0.0.1]:{sshd.port} {sshd.host_key}' >> {tmp_path}/none" in text


def test_a_changed_host_is_refused(sshd: LoopbackSshd, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other").with_suffix(".pub").read_text()
    (tmp_path / "known").write_text(f"[127.0.0.1]:{sshd.port} {other}")
    config = _changed(sshd, tmp_path, (f"{sshd.known_hosts}", f"{tmp_path}/known"))
    assert "has changed" in _refused(config)


def test_a_host_known_by_another_name(sshd: LoopbackSshd, tmp_path: Path) -> None:
    (tmp_path / "known").write_text(f"[the-node]:{sshd.port} {sshd.host_key}\n")
    config = _changed(
        sshd, tmp_path, (f"{sshd.known_hosts}", f"{tmp_path}/known\n  HostKeyAlias the-node")
    )
    _dial(config).close()


def test_keys_that_do_not_let_us_in(sshd: LoopbackSshd, tmp_path: Path) -> None:
    stranger = make_key(tmp_path / "stranger")
    config = _changed(
        sshd, tmp_path, (f"IdentityFile {sshd.folder}/client", f"IdentityFile {stranger}")
    )
    text = _refused(config)
    assert f"it accepts none of our keys ({stranger} was refused)" in text
    assert f"ssh-copy-id -p {sshd.port} " in text


def test_a_host_that_ends_the_connection_while_it_is_asked_to_let_us_in(
    sshd: LoopbackSshd, tmp_path: Path
) -> None:
    stranger = make_key(tmp_path / "stranger")
    config = _changed(
        sshd, tmp_path, (f"IdentityFile {sshd.folder}/client", f"IdentityFile {stranger}")
    )
    before = sshd.server_config.read_text()
    sshd.server_config.write_text(before + "MaxAuthTries 1\n")
    try:
        assert f"the login did not finish ({stranger}: " in _refused(config)
    finally:
        sshd.server_config.write_text(before)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("locked", "needs a passphrase"),
        ("text", "is not a private key"),
        ("key.pub", "key.pub is a public key: name the private key, "),
        ("${HOME}/key", "there is no file ${HOME}/key"),
    ],
)
def test_keys_that_cannot_be_tried(
    sshd: LoopbackSshd, tmp_path: Path, kind: str, words: str
) -> None:
    if kind == "locked":
        make_key(tmp_path / "key", "a passphrase")
    elif kind == "text":
        (tmp_path / "key").write_text("no key")
    elif kind == "key.pub":
        make_key(tmp_path / "key")
    name = kind if "key" in kind else "key"
    path = name if "$" in name else tmp_path / name
    config = _changed(
        sshd, tmp_path, (f"IdentityFile {sshd.folder}/client", f"IdentityFile {path}")
    )
    assert words in _refused(config)


def test_a_key_that_the_agent_alone_has(
    sshd: LoopbackSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _changed(
        sshd, tmp_path, (f"IdentityFile {sshd.folder}/client", f"IdentityFile {tmp_path}/none"),
        ("IdentitiesOnly yes", "IdentitiesOnly no"),
    )  # fmt: skip
    place = tmp_path / "agent"
    with subprocess.Popen(["ssh-agent", "-D", "-a", place], stdout=subprocess.DEVNULL) as agent:
        try:
            until(place.exists, "there is no agent", 30.0)
            monkeypatch.setenv("SSH_AUTH_SOCK", str(place))
            assert f"there is no file {tmp_path}/none" in _refused(config)
            subprocess.run(["ssh-add", "-q", sshd.folder / "client"], check=True, timeout=60)
            _dial(config).close()
        finally:
            agent.terminate()


def test_a_host_that_takes_passwords_only(sshd: LoopbackSshd) -> None:
    before = sshd.server_config.read_text()
    passwords = before.replace("PasswordAuthentication no", "PasswordAuthentication yes")
    sshd.server_config.write_text(passwords + "PubkeyAuthentication no\n")
    try:
        assert "it accepts no keys, only password; passwords are never used" in _refused(
            sshd.config
        )
    finally:
        sshd.server_config.write_text(before)


def test_nobody_there(sshd: LoopbackSshd, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    circle = "Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n"
    (tmp_path / "config").write_text(circle + sshd.config.read_text())
    unknown = "no.such.host.invalid"
    for host, words in (
        (replace(HERE, ssh_port=port), "Connection refused"),
        (replace(HERE, address=unknown), f"the name {unknown} is not known"),
        (replace(HERE, address="a"), "do they name each other"),
    ):
        assert words in _refused(tmp_path / "config", host)


def test_ipv6(tmp_path: Path) -> None:
    try:
        server = LoopbackSshd(tmp_path, host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    try:
        agent = _dial(server.config, Host(id=0, address="::1", port=0))
        assert agent.ask(Service.LINKS, {"do": "clock"})
        agent.close()
    finally:
        server.close()


def test_an_agent_that_does_not_answer(
    sshd: LoopbackSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _changed(
        sshd, tmp_path, (f"IdentityFile {sshd.folder}/client", f"IdentityFile {tmp_path}/none"),
        ("IdentitiesOnly yes", "IdentitiesOnly no"),
    )  # fmt: skip
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "agent"))
        silent.listen()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        with pytest.raises(JobError, match="the SSH agent does not answer"):
            _dial(config, timeout_s=3.0)  # the real SSH server answers in this time
