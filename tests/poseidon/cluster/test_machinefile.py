"""Machinefiles: what is read, and every mistake with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.cluster.machinefile import (
    Host,
    HostOptions,
    HostRole,
    has_remote_hosts,
    is_loopback,
    parse_machinefile,
    parse_options,
    read_machinefile,
    socket_host,
)
from poseidon.errors import MachinefileError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0 127.0.0.1 9999", [(0, "127.0.0.1", 9999)]),
        ("\ufeff0 localhost 0\n".removeprefix("\ufeff"), [(0, "localhost", 0)]),
        (
            "# two\n\n 0\t node-0.cluster   9999 # first\n1 ::1 65535\n",
            [(0, "node-0.cluster", 9999), (1, "::1", 65535)],
        ),
        ("1 10.0.0.2 1\r\n0 10.0.0.1 1\r\n", [(0, "10.0.0.1", 1), (1, "10.0.0.2", 1)]),
        ("0 [fe80::1%eth0] 7", [(0, "fe80::1%eth0", 7)]),
        ("0 127.0.0.1 0\n1 127.0.0.1 0", [(0, "127.0.0.1", 0), (1, "127.0.0.1", 0)]),
        ("0 127.0.0.1 5\n1 127.0.0.2 5", [(0, "127.0.0.1", 5), (1, "127.0.0.2", 5)]),
    ],
)
def test_reads(text: str, expected: list[tuple[int, str, int]]) -> None:
    clients = parse_machinefile(text, source="hosts")
    assert clients == tuple(Host(id=i, address=host, port=port) for i, host, port in expected)


@pytest.mark.parametrize(
    ("text", "channels", "place", "words"),
    [
        ("", 1, "hosts: ", "no client found"),
        ("# nothing\n\n", 1, "hosts: ", "<id> <host> <port>"),
        ("0 127.0.0.1", 1, "hosts:1: ", "expected '<id> <host> <port>', found '0 127.0.0.1'"),
        ("\nzero 127.0.0.1 1", 1, "hosts:2: ", "client id must be a whole number"),
        ("-1 127.0.0.1 1", 1, "hosts:1: ", "'-1'"),
        ("٣ 127.0.0.1 1", 1, "hosts:1: ", "client id"),
        ("99999999999999999999 127.0.0.1 1", 1, "hosts:1: ", "client id"),
        ("0 127.0.0.1 "
"65536", 1, "hosts:1: ", "the port must be a whole number (0 to 65535), not '65536'"),
        ("0 127.0.0.1 http", 1, "hosts:1: ", "'http'"),
        ("0 127.0.0.1 65535", 2, "hosts:1: ", "expected a port up to 65534"),
        ("0 256.0.0.1 1", 1, "hosts:1: ", "'256.0.0.1' is not an IPv4 address"),
        ("0 10.1 1", 1, "hosts:1: ", "not an IPv4 address"),
        ("0 ::g 1", 1, "hosts:1: ", "'::g' is not an IPv6 address"),
        ("0 fe80::1%a;b 1", 1, "hosts:1: ", "interface"),
        ("0 -oProxyCommand=x 1", 1, "hosts:1: ", "neither a host name nor an address"),
        ("0 $(reboot) 1", 1, "hosts:1: ", "neither a host name nor an address"),
        ("0 a..b 1", 1, "hosts:1: ", "neither"),
        ("0 [host] 1", 1, "hosts:1: ", "neither"),
        (f"0 {'a.' * 130}b 1", 1, "hosts:1: ", "neither"),
        ("0 h 1\n0 h 5", 1, "hosts:2: ", "client 0 is already on line 1"),
        ("0 h 1\n3 h 5", 1, "hosts:2: ", "1 is missing"),
        ("1 h 1", 1, "hosts:1: ", "0 is missing"),
        ("0 h 5\n1 h 5", 1, "hosts:2: ", "clients 0 and 1 on h share port 5"),
        ("1 h 7\n0 H 5", 3, "hosts:2: ", "at least 3 apart"),
        ("0 localhost 5\n1 127.0.0.1 5", 1, "hosts:2: ", "share port 5"),
        ("0 h 5 gpu=0", 1, "hosts:1: ", "unknown word 'gpu=0'; did you mean 'gpus='?"),
        ("0 h 5 colour=red", 1, "hosts:1: ", "unknown word 'colour=red'"),
        ("0 h 5 more", 1, "hosts:1: ", "unknown word 'more'"),
        ("0 h 5 role", 1, "hosts:1: ", "unknown word 'role'"),
        ("0 h 5 role=shard", 1, "hosts:1: ", "'role=shard' is not a role; expected role=server"),
        ("0 h 5 rôle=server", 1, "hosts:1: ", "did you mean 'role='?"),
        ("0 h 5 role=both role=both", 1, "hosts:1: ", "a machine has one role"),
        ("0 h 5 role=server\n1 h 6 role=server", 1, "hosts: ", "every client has role=server"),
        ("0 h 5 role=server\n1 h 5", 1, "hosts:2: ", "share port 5"),
        ("0 h 5\n" * 10_001, 1, "hosts:10001: ", "at most 10,000 hosts"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(text: str, channels: int, place: str, words: str) -> None:
    with pytest.raises(MachinefileError) as caught:
        parse_machinefile(text, source="hosts", channels=channels)
    assert str(caught.value).startswith(place)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_roles() -> None:
    text = "0 h 0 role=server\n1 h 0 role=worker # alone\n2 h 0 role=both\n3 h 0"
    clients = parse_machinefile(text, source="hosts")
    assert [client.role for client in clients] == [
        HostRole.SERVER,
        HostRole.WORKER,
        HostRole.BOTH,
        HostRole.BOTH,
    ]
    assert [(client.works, client.serves) for client in clients] == [
        (False, True),
        (True, False),
        (True, True),
        (True, True),
    ]


def test_a_machine_without_shards_takes_no_port() -> None:
    text = "0 h 5\n1 h 5 role=worker\n2 h 65535 role=worker"
    assert len(parse_machinefile(text, source="hosts", channels=3)) == 3


def test_ranges_that_only_touch_are_legal() -> None:
    assert len(parse_machinefile("0 h 5\n1 h 8\n2 h 2", source="hosts", channels=3)) == 3


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_files_of_windows(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "hosts").write_bytes("0 h 0\r\n1 i 0\r\n".encode(encoding))
    assert [host.address for host in read_machinefile(tmp_path / "hosts")] == ["h", "i"]


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(MachinefileError, match="no such machinefile"):
        read_machinefile(tmp_path / "absent")
    with pytest.raises(MachinefileError, match="cannot read the machinefile"):
        read_machinefile(tmp_path)
    for content in (b"\xff\xfe\x00", b"\x7fELF\x02\x00\x9c"):
        (tmp_path / "binary").write_bytes(content)
        with pytest.raises(MachinefileError, match=r"^\S+: a machinefile is UTF-8 text"):
            read_machinefile(tmp_path / "binary")


def test_the_samples_are_legal() -> None:
    local = read_machinefile(ROOT / "machinefiles" / "localserver")
    assert [client.address for client in local] == ["127.0.0.1", "127.0.0.1"]
    assert len(read_machinefile(ROOT / "machinefiles" / "two_nodes.example", channels=8)) == 2
    assert len(read_machinefile(ROOT / "machinefiles" / "four_nodes.example", channels=8)) == 4
    dedicated = read_machinefile(ROOT / "machinefiles" / "dedicated_servers", channels=2)
    assert [client.role.value for client in dedicated] == ["worker", "worker", "server", "server"]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("128.0.0.1", False),
        ("::2", False),
        ("0.0.0.0", False),
        ("localhost.example.org", False),
        ("node0", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("host", "written"),
    [("localhost", "127.0.0.1"), ("::1", "[::1]"), ("10.0.0.1", "10.0.0.1"), ("node0", "node0")],
)
def test_socket_host(host: str, written: str) -> None:
    assert socket_host(host) == written


def test_no_words_leave_everything_open() -> None:
    assert parse_options([], "hosts:1") == HostOptions()


def test_every_word() -> None:
    words = [
        "workdir=~/run",
        "role=worker",
        "user=ml-01",
        "ssh_port=2222",
        "gpus=0,3",
        "python=/opt/py3.11/bin/python",
    ]
    assert parse_options(words, "hosts:1") == HostOptions(
        role=HostRole.WORKER,
        user="ml-01",
        ssh_port=2222,
        gpus="0,3",
        python="/opt/py3.11/bin/python",
        workdir="~/run",
    )


def test_workers_on_the_cpu() -> None:
    assert parse_options(["workers=12", "gpus=cpu"], "hosts:1").workers == 12
    with pytest.raises(MachinefileError, match=r"^hosts:1: gpus=0,1 gives each device a worker"):
        parse_options(["workers=2", "gpus=0,1"], "hosts:1")


@pytest.mark.parametrize("word", ["python=python3.11", "python=~/venv/bin/python", "gpus=cpu"])
def test_other_legal_values(word: str) -> None:
    name, _, value = word.partition("=")
    assert getattr(parse_options([word], "hosts:1"), name) == value


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("user=-oProxyCommand=x", "is not a user name"),
        ("user=", "is not a user name"),
        ("user=a;b", "is not a user name"),
        ("user=a\x00", "is not a user name"),
        ("user=a\n", "is not a user name"),
        ("ssh_port=0", "ssh_port must be 1 to 65535"),
        ("ssh_port=65536", "ssh_port must be a whole number"),
        ("ssh_port=-1", "ssh_port must be a whole number"),
        ("ssh_port=22;reboot", "ssh_port must be a whole number"),
        ("gpus=all", "expected device numbers"),
        ("gpus=", "expected device numbers"),
        ("gpus=0,", "expected device numbers"),
        ("gpus=0,00", "lists a device twice"),
        ("gpus=$(id)", "expected device numbers"),
        ("workers=0", "workers must be 1 to 1000, not 0"),
        ("workers=1001", "workers must be a whole number"),
        ("workers=x", "workers must be a whole number"),
        ("python=-c", "or a program's name"),
        ("python=~other/python", "or a program's name"),
        ("python=bin/python", "or a program's name"),
        ("python=/usr/bin/python|sh", "or a program's name"),
        ("workdir=relative", "expected a path from / or ~/ on"),
        ("workdir=~", "expected a path from / or ~/ on"),
        ("workdir=/a`id`", "expected a path from / or ~/ on"),
        ("workdir=/a'b", "expected a path from / or ~/ on"),
        ("pythn=python", "did you mean 'python='?"),
    ],
)
def test_mistakes_in_options(word: str, expected: str) -> None:
    with pytest.raises(MachinefileError) as caught:
        parse_options([word], "hosts:3")
    assert str(caught.value).startswith("hosts:3: ")
    assert expected in str(caught.value)


def test_each_word_stands_once() -> None:
    with pytest.raises(MachinefileError, match="a machine has one user"):
        parse_options(["user=a", "user=a"], "hosts:1")


@pytest.mark.parametrize(
    ("line", "is_here", "name"),
    [
        ("0 127.0.0.1 0", True, "127.0.0.1"),
        ("0 localhost 9 gpus=cpu", True, "localhost"),
        ("0 127.0.0.1 0 ssh_port=2222", False, "127.0.0.1:2222"),
        ("0 ::1 0 ssh_port=2222", False, "[::1]:2222"),
        ("0 127.0.0.1 0 user=ml", False, "ml@127.0.0.1"),
        ("0 127.0.0.1 0 user=ml ssh_port=2222", False, "ml@127.0.0.1:2222"),
        ("0 node0 0 ssh_port=2222", False, "node0"),
    ],
)
def test_an_sshd_of_a_loopback_address_is_a_host_of_its_own(
    line: str, is_here: bool, name: str
) -> None:
    (host,) = parse_machinefile(line, source="hosts")
    assert (host.is_here, has_remote_hosts([host]), host.name) == (is_here, not is_here, name)
