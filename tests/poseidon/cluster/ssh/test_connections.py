"""Connections to a real sshd on this machine: who is let in, who is refused and in which words."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import paramiko
import pytest

from poseidon.cluster.machinefile import Host
from poseidon.cluster.ssh.channel import run_over
from poseidon.cluster.ssh.config import SshSettings
from poseidon.cluster.ssh.connections import SshConnection, close_all, connect, connect_all
from poseidon.errors import JobError
from tests.support.loopback_sshd import LoopbackSshd, make_key
from tests.support.polling import until

pytestmark = pytest.mark.needs("sshd")
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
CLIENT = Host(id=0, address="127.0.0.1", port=0)


def _refused(config: Path, client: Host = CLIENT, timeout_s: float = 15.0) -> str:
    with pytest.raises(JobError) as caught:
        connect(client, SshSettings(config=config, connect_timeout_s=timeout_s))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _changed(sshd: LoopbackSshd, folder: Path, *changes: tuple[str, str]) -> Path:
    text = sshd.config.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "config").write_text(text)
    return folder / "config"


def test_a_program_gets_its_words_and_input_as_they_are(host: SshConnection) -> None:
    words = ["it's", "$HOME", "`id`", "a;b", "", "\\", "!"]
    done = host.run(["printf", "%s|", *words], timeout_s=10)
    assert (done.status, done.stdout.decode().split("|")[:-1]) == (0, words)
    payload = bytes(range(256)) * 4096
    assert host.run(["cat"], stdin=payload, timeout_s=10).stdout == payload


def test_statuses_and_both_outputs(host: SshConnection) -> None:
    done = host.run(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout_s=10)
    assert (done.status, done.stdout, done.stderr) == (3, b"out\n", b"err\n")
    assert host.run(["sh", "-c", "kill -9 $$"], timeout_s=10).status == -1


def test_a_program_that_does_not_end(host: SshConnection) -> None:
    with pytest.raises(JobError, match=r"'sleep' did not end within 0.2 s"):
        host.run(["sleep", "100"], timeout_s=0.2)


def test_lines_both_ways(host: SshConnection) -> None:
    lines = host.open(
        ["sh", "-c", 'while read -r line; do echo "<$line>"; done; echo bye >&2; exit 4']
    )
    lines.send(b"one")
    lines.send(b"two")
    assert [lines.receive(), lines.receive()] == [b"<one>", b"<two>"]
    assert lines.status(0.0) is None
    lines.close()
    assert lines.receive() is None


def test_the_end_of_a_talk(host: SshConnection) -> None:
    lines = host.open(["sh", "-c", "echo last; echo bye >&2; exit 4"])
    assert [lines.receive(), lines.receive(), lines.receive_error()] == [b"last", None, b"bye"]
    assert lines.status(10.0) == 4
    lines.close()


def test_sftp(host: SshConnection, tmp_path: Path) -> None:
    session = host.sftp()
    names = [tmp_path / "file", tmp_path / os.fsdecode(b"caf\xe9")]
    for name in names:
        with session.open(str(name), "wb") as file:
            file.write(b"content")
    session.close()
    assert [name.read_bytes() for name in names] == [b"content"] * 2


def test_a_server_that_stops_answering_ends_a_session(
    sshd: LoopbackSshd, host: SshConnection
) -> None:
    session = host.sftp(silence_s=0.2)
    assert session.stat("/").st_mode
    with sshd.halted():
        with pytest.raises(TimeoutError, match=r"^no answer over SFTP for 0.2 s$"):
            session.stat("/")
        with pytest.raises((OSError, EOFError)):
            session.stat("/")  # at once
        session.close()


def test_a_server_that_does_not_answer_to_a_wish(sshd: LoopbackSshd, host: SshConnection) -> None:
    with sshd.halted():
        with pytest.raises(JobError, match=r"SFTP is not available: Timeout opening channel"):
            host.sftp(silence_s=0.2)
        with pytest.raises(JobError, match="Timeout opening channel"):
            host.run(["true"], timeout_s=0.2)


@pytest.mark.parametrize("ask", ["sftp", "run"])
def test_a_server_that_opens_a_channel_and_then_falls_silent(
    sshd: LoopbackSshd, host: SshConnection, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    open_session = paramiko.Transport.open_session
    with ExitStack() as stack:

        def open_and_halt(transport: paramiko.Transport, **settings: Any) -> paramiko.Channel:
            channel = open_session(transport, **settings)
            stack.enter_context(sshd.halted())
            return channel

        monkeypatch.setattr(paramiko.Transport, "open_session", open_and_halt)
        with pytest.raises(JobError, match=r"no answer within 0.2 s$"):
            _ = host.sftp(silence_s=0.2) if ask == "sftp" else host.run(["true"], timeout_s=0.2)


def test_our_own_address(host: SshConnection) -> None:
    assert host.local_address() == "127.0.0.1"


def test_a_broken_line_is_noticed(sshd: LoopbackSshd) -> None:
    host = connect(CLIENT, SshSettings(config=sshd.config))
    lines = host.open(["cat"])
    sshd.break_lines()
    assert lines.receive() is None
    assert not host.alive
    with pytest.raises(JobError, match="cannot start 'true' there"):
        host.run(["true"], timeout_s=5)
    host.close()


class Ended:
    """A connection whose other end has hung up, of which paramiko says no more."""

    def open_session(self, timeout: float) -> None:
        raise EOFError


def test_a_broken_line_is_called_so() -> None:
    with pytest.raises(JobError, match=r"^node1: cannot start 'true' there: the connection broke$"):
        run_over(Ended(), "node1", ["true"], stdin=b"", timeout_s=1.0)  # type: ignore[arg-type]


def test_clients_of_one_host_share_a_connection(sshd: LoopbackSshd) -> None:
    clients = [Host(id=number, address="127.0.0.1", port=0) for number in range(3)]
    hosts = connect_all(clients, SshSettings(config=sshd.config))
    assert list(hosts) == [0, 1, 2]
    assert len(set(hosts.values())) == 1
    close_all(set(hosts.values()))


def test_all_problems_at_once(sshd: LoopbackSshd, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        clients = [
            CLIENT,
            Host(id=1, address="127.0.0.1", port=0, ssh_port=silent.getsockname()[1]),
            Host(id=2, address="127.0.0.1", port=0, user="nobody-of-that-name"),
        ]
        with pytest.raises(JobError) as caught:
            connect_all(clients, SshSettings(config=sshd.config, connect_timeout_s=1.0))
    first, *problems = str(caught.value).split("\n")
    assert first == "2 problems on the 3 hosts:"
    assert "no SSH server that we can use" in problems[0]
    assert "nobody-of-that-name@127.0.0.1" in problems[1] and "was refused" in problems[1]


def test_through_another_host(sshd: LoopbackSshd, tmp_path: Path) -> None:
    jump = f"Host inner\n  HostName 127.0.0.1\n  ProxyJump 127.0.0.1:{sshd.port},127.0.0.1:{sshd.port}\n"
    (tmp_path / "config").write_text(jump + sshd.config.read_text())
    host = connect(Host(id=0, address="inner", port=0), SshSettings(config=tmp_path / "config"))
    assert host.run(["echo", "through"], timeout_s=10).stdout == b"through\n"
    assert host.local_address() == "127.0.0.1"
    host.close()


def test_hosts_that_jump_in_a_circle(sshd: LoopbackSshd, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(
        "Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n" + sshd.config.read_text()
    )
    assert "do they name each other" in _refused(
        tmp_path / "config", Host(id=0, address="a", port=0)
    )


def test_a_program_that_makes_the_connection(sshd: LoopbackSshd, tmp_path: Path) -> None:
    (tmp_path / "relay.py").write_text(RELAY)
    command = f"{sys.executable} {tmp_path}/relay.py {sshd.port}"
    config = _changed(sshd, tmp_path, ("  Port", f"  ProxyCommand {command}\n  Port"))
    host = connect(CLIENT, SshSettings(config=config))
    assert host.run(["true"], timeout_s=10).status == 0
    host.close()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("false", "its ProxyCommand `false` ended with exit status 1: it wrote no error"),
        ("no-such-program %h", "`no-such-program 127.0.0.1` ended with exit status 127: sh: "),
        (
            "sh -c 'echo the gateway is closed >&2; kill -9 $$'",
            "ended with signal 9: the gateway is closed",
        ),
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
    host = connect(CLIENT, SshSettings(config=config))
    assert host.run(["true"], timeout_s=10).status == 0
    host.close()
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
    connect(CLIENT, SshSettings(config=config)).close()


def test_keys_that_do_not_let_us_in(sshd: LoopbackSshd, tmp_path: Path) -> None:
    stranger = make_key(tmp_path / "stranger")
    config = _changed(
        sshd, tmp_path, (f"IdentityFile {sshd.folder}/client", f"IdentityFile {stranger}")
    )
    text = _refused(config)
    assert f"it accepts none of our keys ({stranger} was refused)" in text
    assert f"ssh-copy-id -p {sshd.port} " in text


@pytest.mark.parametrize(
    ("kind", "words"),
    [("locked", "needs a passphrase"), ("text", "is no private key"), ("", "there is none")],
)
def test_keys_that_cannot_be_tried(
    sshd: LoopbackSshd, tmp_path: Path, kind: str, words: str
) -> None:
    if kind == "locked":
        make_key(tmp_path / "key", "a passphrase")
    elif kind == "text":
        (tmp_path / "key").write_text("no key")
    config = _changed(
        sshd, tmp_path, (f"IdentityFile {sshd.folder}/client", f"IdentityFile {tmp_path}/key")
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
            assert "there is none" in _refused(config)
            subprocess.run(["ssh-add", "-q", sshd.folder / "client"], check=True, timeout=60)
            connect(CLIENT, SshSettings(config=config)).close()
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


def test_nobody_there(sshd: LoopbackSshd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "Connection refused" in _refused(
        sshd.config, Host(id=0, address="127.0.0.1", port=0, ssh_port=port)
    )


def test_a_name_that_nobody_knows(sshd: LoopbackSshd) -> None:
    assert "the name no.such.host.invalid is not known" in _refused(
        sshd.config, Host(id=0, address="no.such.host.invalid", port=0)
    )


def test_ipv6(tmp_path: Path) -> None:
    try:
        server = LoopbackSshd(tmp_path, host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    try:
        host = connect(Host(id=0, address="::1", port=0), SshSettings(config=server.config))
        assert host.local_address() == "::1"
        host.close()
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
            connect(CLIENT, SshSettings(config=config, connect_timeout_s=2.0))


def test_output_that_cannot_be_read_is_an_error(
    host: SshConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(channel: paramiko.Channel, size: int) -> bytes:
        raise RuntimeError("no room for output")

    monkeypatch.setattr(paramiko.Channel, "recv_stderr", fail)
    with pytest.raises(JobError, match="no room for output"):
        host.run(["true"], timeout_s=10)


def test_a_program_that_reads_slowly_has_one_limit(host: SshConnection) -> None:
    began_s = time.monotonic()
    with pytest.raises(JobError, match="did not end within 2 s"):
        host.run(
            ["sh", "-c", "while sleep 1; do head -c 300000 >/dev/null; done"],
            stdin=bytes(8 << 20),
            timeout_s=2,
        )
    assert time.monotonic() - began_s < 4


@pytest.mark.parametrize("method", ["send", "close"])
def test_a_transport_that_is_gone_is_a_broken_channel(
    host: SshConnection, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    lines = host.open(["cat"])

    def gone(transport: paramiko.Transport, data: object) -> None:
        raise EOFError

    with monkeypatch.context() as patched:
        patched.setattr(paramiko.Transport, "_send_user_message", gone)
        if method == "send":
            with pytest.raises(OSError, match="broke"):
                lines.send(b"text")
        else:
            lines.close()
