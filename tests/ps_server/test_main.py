"""One shard as a process: its flags, its launcher's line, its end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ps_server import Client, StoreSpec, TableSpec
from ps_server.__main__ import Reporter, ShardTrace, _follow_launcher, main, parse
from ps_server.errors import PeerLost, ServerError, SpecError
from ps_server.monitor import owned_thread
from ps_server.network import Network
from ps_server.protocol.shard import Shard
from ps_server.rounds import Rounds
from ps_server.server import Server
from ps_server.statistics import ShardStatistics
from tests.support.cluster import TIMEOUT_S, zeros
from tests.support.memory_transport import MemoryNetwork

COMMAND = [sys.executable, "-m", "ps_server"]


def test_flags() -> None:
    options = parse(["--listen", "tcp://127.0.0.1:0", "--workers", "3", "--shard", "2"])
    assert (options.shard, options.workers, options.token) == (2, 3, b"")


def write_secret(path: Path, content: str) -> None:
    path.touch(0o600)
    path.write_text(content)


def test_a_token_file(tmp_path: Path) -> None:
    write_secret(tmp_path / "token", "secret\n")
    options = parse(
        ["--listen", "tcp://0.0.0.0:1", "--workers", "1", "--token-file", str(tmp_path / "token")]
    )
    assert options.token == b"secret"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot read .*: No such file"),
        ("\n", "has a secret of 0 bytes; expected 1 to 1000"),
        ("x" * 1001, "has a secret of 1001 bytes; expected 1 to 1000"),
    ],
)
def test_a_token_file_without_a_token(tmp_path: Path, content: str | None, sentence: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        write_secret(path, content)
    with pytest.raises(SpecError, match=f"^--token-file: .*{sentence}"):
        parse(["--listen", "tcp://127.0.0.1:0", "--workers", "1", "--token-file", str(path)])


def test_a_token_file_that_others_can_read(tmp_path: Path) -> None:
    write_secret(path := tmp_path / "token", "secret\n")
    path.chmod(0o640)
    with pytest.raises(SpecError, match=r"^--token-file: .* can be read by others: 'chmod 600 "):
        parse(["--listen", "tcp://127.0.0.1:0", "--workers", "1", "--token-file", str(path)])


def test_of_a_large_token_file_the_beginning_is_read(tmp_path: Path) -> None:
    write_secret(path := tmp_path / "token", "")
    os.truncate(path, 1 << 30)
    with pytest.raises(SpecError, match=r"^--token-file: .* a secret of 1048576 bytes"):
        parse(["--listen", "tcp://127.0.0.1:0", "--workers", "1", "--token-file", str(path)])


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:5555", "tcp://10.0.0.1:5555", "tcp://*:5555", "tcp://[::]:1"]
)
def test_beyond_loopback_a_token_is_required(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--listen", address, "--workers", "1"])
    assert caught.value.code == 2
    assert "--keys or --token-file is required" in capsys.readouterr().err


def test_missing_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--workers", "1"])
    assert "--listen and --workers are required" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["", "{}", "nonsense", '{"workers": 1, "address": "a", "token": 3}']
)
def test_a_launchers_line_that_does_not_fit(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", __import__("io").StringIO(line))
    with pytest.raises(SpecError, match="the launcher's document"):
        parse(["--stdin"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--listen", "nonsense"], "--listen: expected tcp://host:port, found 'nonsense'"),
        (["--listen", "127.0.0.1:5555"], "expected tcp://host:port, found '127.0.0.1:5555'"),
        (["--listen", "tcp://127.0.0.1"], "expected tcp://host:port, found 'tcp://127.0.0.1'"),
        (["--listen", "tcp://127.0.0.1:x"], "expected tcp://host:port, found 'tcp://127.0.0.1:x'"),
        (["--workers", "0"], "--workers: expected 1 to 4096, found 0"),
        (["--workers", "4097"], "--workers: expected 1 to 4096, found 4097"),
        (["--shard", "-1"], "--shard: expected 0 to 4095, found -1"),
    ],
)
def test_a_flag_out_of_range(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--listen", "tcp://127.0.0.1:0", "--workers", "1", *flags])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"{sentence}\n")


def test_an_address_that_cannot_be_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_secret(token := tmp_path / "token", "secret")
    of_another_machine = "tcp://203.0.113.7:5555"
    words = ["--listen", of_another_machine, "--workers", "1", "--token-file", str(token)]
    assert main(words) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["event"] == "error"
    assert captured.err.startswith(f"ps_server: cannot listen on {of_another_machine}")


class Told:
    """A shard's process, as its launcher tells it what to do.

    Args:
        first: the first line of its standard input.
    """

    def __init__(self, first: Mapping[str, object]) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "--stdin", "--job", "x", "--shard", "1"], stdin=-1, stdout=-1, text=True
        )
        self.say(first)

    def say(self, line: Mapping[str, object] | str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
        self.process.stdin.flush()

    def hear(self, event: str) -> dict[str, object]:
        """Return the next event of a kind."""
        assert self.process.stdout is not None
        while (heard := json.loads(self.process.stdout.readline()))["event"] != event:
            pass
        found: dict[str, object] = heard
        return found

    def connect(self, address: str, token: bytes) -> Client:
        store = StoreSpec(workers=1, shards=1, tables=(TableSpec(name="w", size=2),))
        client = Client([address], Network(token=token, timeout_s=TIMEOUT_S), store)
        client.start(zeros(store))
        return client


@pytest.mark.processes
def test_a_launcher_starts_and_stops_it() -> None:
    shard = Told({"token": "00ff", "workers": 2, "address": "tcp://127.0.0.1:0"})
    with shard.process:
        addresses = {str(shard.hear("listening")["address"])}
        for number in (1, 2):
            shard.say("nonsense")
            shard.say({"do": "listen", "round": number})
            heard = shard.hear("listening")
            assert heard["round"] == number
            addresses.add(str(heard["address"]))
        assert len(addresses) == 3
        shard.say({"do": "stop"})
        shard.hear("done")
        assert shard.process.wait(20) == 0


@pytest.mark.processes
def test_a_shard_that_pauses_goes_on_with_other_workers_and_another_number() -> None:
    first = {"token": "00ff", "workers": 1, "address": "tcp://127.0.0.1:0"}
    shard = Told(first)
    with shard.process:
        address = str(shard.hear("listening")["address"])
        host, port = address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), TIMEOUT_S) as before:
            before.recv(1)
            shard.say({"do": "pause"})
            assert shard.hear("paused")["snapshot"] is None
            while before.recv(1024):
                pass
        document = {**first, "token": "0011", "address": address, "shard": 0}  # the same port
        shard.say({"do": "go_on", "document": document})
        assert shard.hear("listening")["address"] == address
        after = shard.connect(address, b"0011")
        after.push(0, np.ones(2, np.float32), rate=1.0)
        after.clock()
        after.read(0, value := np.zeros(2, np.float32))
        assert list(value) == [-1.0, -1.0]
        after.close()
        shard.say({"do": "stop"})
        shard.hear("done")
        assert shard.process.wait(20) == 0


@pytest.mark.processes
def test_a_document_that_does_not_fit_ends_a_shard_that_has_paused() -> None:
    shard = Told({"token": "00ff", "workers": 1, "address": "tcp://127.0.0.1:0"})
    with shard.process:
        shard.say({"do": "pause"})
        shard.hear("paused")
        shard.say({"do": "go_on", "document": {"shard": 0}})
        assert "ShardDocument has no workers" in str(shard.hear("error")["message"])
        assert shard.process.wait(20) == 1


class Unreadable:
    """A standard input with a line that is not text."""

    def __iter__(self) -> Unreadable:
        return self

    def __next__(self) -> str:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


@pytest.fixture
def rounds() -> Rounds:
    found = Rounds(lambda _: Server(Shard(0, 1, b""), MemoryNetwork(1).server(0)))
    found.listen()
    return found


def test_commands_that_cannot_be_read_end_the_shard(
    monkeypatch: pytest.MonkeyPatch, rounds: Rounds
) -> None:
    monkeypatch.setattr("sys.stdin", Unreadable())
    follow = partial(_follow_launcher, rounds, Reporter(), ShardTrace())
    thread = owned_thread(
        "commands", follow, rounds.failing("reading the launcher's commands failed")
    )
    thread.start()
    with pytest.raises(
        ServerError, match=r"^reading the launcher's commands failed: UnicodeDecodeError"
    ):
        rounds.wait(stays=True)
    thread.join()


def test_statistics_that_cannot_be_had_end_the_shard(
    monkeypatch: pytest.MonkeyPatch, rounds: Rounds
) -> None:
    def broken() -> ShardStatistics:
        raise KeyError("counts")

    monkeypatch.setattr(rounds, "statistics", broken)
    monkeypatch.setattr("ps_server.__main__.ALIVE_S", 0.0)
    reporter = Reporter()
    reporter.start_heartbeat(rounds)
    with pytest.raises(PeerLost, match=r"^reporting to the launcher failed: KeyError"):
        rounds.wait(stays=True)
    reporter.close()


def test_a_trace_is_asked_for_by_flag_or_by_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ["--listen", "tcp://127.0.0.1:0", "--workers", "1"]
    assert parse(plain).trace == ""
    assert parse([*plain, "--trace", "t.json"]).trace == "t.json"
    line = '{"workers": 1, "address": "tcp://127.0.0.1:0", "token": "ab", "trace": "/tmp/t.json"}'
    monkeypatch.setattr("sys.stdin", __import__("io").StringIO(line))
    assert parse(["--stdin"]).trace == "/tmp/t.json"


def test_a_trace_that_cannot_be_written_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--listen",
        "tcp://127.0.0.1:0",
        "--workers",
        "1",
        "--trace",
        str(tmp_path / "no" / "t.json"),
    ]
    assert main(flags) == 1
    assert "No such file" in capsys.readouterr().err
