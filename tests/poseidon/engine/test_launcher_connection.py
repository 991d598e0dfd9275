"""A worker's connection to its launcher."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from poseidon.base.call_names import LoopPosition
from poseidon.engine.launcher_connection import WORKERS, LauncherConnection
from poseidon.engine.process import launcher_streams
from poseidon.errors import JobError
from poseidon.exchange.base import ExchangeSettings
from ps_server import Interrupted, SignalKind
from tests.support.exchanges import AloneExchange


def connection(*commands: object) -> tuple[LauncherConnection, io.StringIO]:
    outlet = io.StringIO()
    lines = "".join(json.dumps(command) + "\n" for command in commands)
    return LauncherConnection(io.StringIO("no JSON\n[1]\n" + lines), outlet), outlet


def test_events_are_lines_of_json() -> None:
    launcher, outlet = connection()
    launcher.send("progress", iteration=3)
    launcher.send("done")
    assert [json.loads(text) for text in outlet.getvalue().splitlines()] == [
        {"event": "progress", "iteration": 3},
        {"event": "done"},
    ]


def test_events_to_a_launcher_that_has_gone_are_dropped() -> None:
    launcher, outlet = connection()
    outlet.close()
    launcher.send("done")


def test_a_layer_neither_reads_commands_nor_writes_into_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipes = [os.pipe() for _ in range(3)]
    (commands, launcher), (events, stdout), (printed, stderr) = pipes
    own = [os.dup(number) for number in range(3)]
    for number, descriptor in enumerate((commands, stdout, stderr)):
        os.dup2(descriptor, number)
    monkeypatch.setattr(sys, "stdout", os.fdopen(1, "w", closefd=False))
    try:
        inlet, outlet = launcher_streams()
        os.write(launcher, b"{}\n")
        assert os.read(0, 1) == b""
        # a fork closes sys.stdin, for which it would wait while a thread reads commands there
        assert inlet is not sys.stdin
        assert inlet.readline() == "{}\n"
        print("no line\nends", end="")
        LauncherConnection(inlet, outlet).send("done")
        assert os.read(events, 99) == b'{"event": "done"}\n'
        assert os.read(printed, 99) == b"no line\nends"
        inlet.close()
        outlet.close()
    finally:
        for number, descriptor in enumerate(own):
            os.dup2(descriptor, number)
        for descriptor in (*own, *(end for pipe in pipes for end in pipe)):
            os.close(descriptor)


def test_addresses_come_by_command() -> None:
    launcher, _ = connection({"do": "other"}, {"do": "connect", "addresses": ["tcp://a:1"]})
    launcher.start()
    try:
        assert launcher.exchange_addresses() == ["tcp://a:1"]
        assert launcher.gone.wait(60)
    finally:
        launcher.close()


def test_an_address_is_reported_and_a_stop_meanwhile_waits() -> None:
    launcher, outlet = connection({"do": "stop"}, {"do": "connect", "addresses": ["tcp://own:2"]})
    launcher.start()
    try:
        assert launcher.exchange_addresses("tcp://own:2") == ["tcp://own:2"]
        assert json.loads(outlet.getvalue().splitlines()[0]) == {
            "event": "listening",
            "address": "tcp://own:2",
            "round": 0,
            "among": "job",
        }
        assert launcher.requests.commands.get() == {"do": "stop"}
    finally:
        launcher.close()


def test_addresses_are_exchanged_several_times_among_the_job_and_among_workers() -> None:
    answers = [
        {"do": "connect", "among": among, "round": number, "addresses": [f"tcp://{among}:{number}"]}
        for among, number in (("job", 1), ("workers", 0), ("job", 0))
    ]
    launcher, outlet = connection(*answers)
    launcher.start()
    try:
        assert launcher.exchange_addresses() == ["tcp://job:0"]
        assert launcher.exchange_addresses("tcp://own:2", among=WORKERS) == ["tcp://workers:0"]
        assert launcher.exchange_addresses() == ["tcp://job:1"]
    finally:
        launcher.close()
    assert [json.loads(line) for line in outlet.getvalue().splitlines()] == [
        {"event": "listening", "address": "tcp://own:2", "round": 0, "among": "workers"},
        {"event": "connecting", "round": 1, "among": "job"},
    ]


def test_a_request_to_pause_ends_the_wait_for_addresses() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as inlet, os.fdopen(writing, "w") as commands:
        launcher = LauncherConnection(inlet, io.StringIO())
        launcher.start()
        try:
            commands.write('{"do": "pause"}\n')
            commands.flush()
            with pytest.raises(Interrupted, match="the job continues with different workers"):
                launcher.exchange_addresses()
            assert launcher.is_asked_to_pause
            commands.close()
            with pytest.raises(JobError, match="has gone while the worker was paused"):
                launcher.pause(None)
        finally:
            launcher.close()


def test_a_worker_that_goes_on_gets_the_addresses_of_the_next_start() -> None:
    launcher, outlet = connection(
        {"do": "connect", "addresses": ["tcp://first:0"]},
        {"do": "pause"},
        {"do": "go_on", "document": {"rank": 1}},
        {"do": "connect", "addresses": ["tcp://second:0"]},
    )
    launcher.start()
    launcher.heartbeat.facts["position"] = LoopPosition(steps=10)
    try:
        assert launcher.pause(12, "worker 0 was lost") == {"rank": 1}
        assert launcher.heartbeat.facts == {}, (
            "a heartbeat of the next start has the position of this one"
        )
        assert not launcher.is_asked_to_pause
        assert launcher.gone.wait(60)
        assert launcher.exchange_addresses() == ["tcp://second:0"]
    finally:
        launcher.close()
    assert json.loads(outlet.getvalue()) == {
        "event": "paused",
        "snapshot": 12,
        "is_part": False,
        "message": "worker 0 was lost",
        "regrouped": False,
    }


class Unreadable(io.StringIO):
    """Standard input with a line that is not text."""

    def __next__(self) -> str:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


def test_commands_that_cannot_be_read_count_as_a_launcher_that_has_gone() -> None:
    launcher = LauncherConnection(Unreadable(), io.StringIO())
    launcher.start()
    try:
        assert launcher.gone.wait(60)
        with pytest.raises(JobError, match="stopped before training began"):
            launcher.exchange_addresses()
    finally:
        launcher.close()


def failures(outlet: io.StringIO) -> list[str]:
    events = [json.loads(text) for text in outlet.getvalue().splitlines()]
    return [event["message"] for event in events if event["event"] == "error"]


def until(outlet: io.StringIO) -> list[str]:
    """Wait until a thread has reported its failure."""
    deadline_s = time.monotonic() + 60
    while not (found := failures(outlet)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return found


def test_a_failure_while_requests_are_forwarded_reaches_the_launcher() -> None:
    launcher, outlet = connection()
    exchange = AloneExchange([], ExchangeSettings())

    def fail(kind: SignalKind) -> None:
        raise RuntimeError(f"no {kind.name}")

    exchange.control.request = fail  # type: ignore[method-assign]
    launcher.requests.commands.put({"do": "stop"})
    launcher.forward_requests(exchange, 0)
    assert until(outlet) == ["the thread poseidon-requests failed: RuntimeError: no STOP"]


def test_a_failure_of_the_heartbeat_reaches_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.engine.heartbeat.HEARTBEAT_S", 0.0)
    launcher, outlet = connection()

    def fail() -> None:
        raise RuntimeError("no reading")

    monkeypatch.setattr(launcher.heartbeat.watchdog, "read", fail)
    launcher.start()
    try:
        assert until(outlet) == ["the thread poseidon-alive failed: RuntimeError: no reading"]
    finally:
        launcher.close()


@pytest.mark.parametrize("commands", [(), ({"do": "stop"},)])
def test_a_launcher_that_goes_before_training_is_an_error(commands: tuple[object, ...]) -> None:
    launcher, _ = connection(*commands)
    launcher.start()
    try:
        with pytest.raises(JobError, match="the job was stopped before training began"):
            launcher.exchange_addresses()
    finally:
        launcher.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("limit_s", "waits_for"), [(0, "threading.Event()"), (600, "launcher.gone")]
)
def test_what_a_worker_has_started_ends_with_it_once_the_launcher_has_gone(
    limit_s: int, waits_for: str
) -> None:
    worker = (
        "import io, subprocess, threading\n"
        "from poseidon.engine import launcher_connection as connection\n"
        f"connection.ORPHAN_S = {limit_s}\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "launcher = connection.LauncherConnection(io.StringIO(), io.StringIO())\n"
        "launcher.end_without_launcher()\n"
        "launcher.start()\n"
        f"{waits_for}.wait()"
    )
    command = [sys.executable, "-c", worker]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        output, _ = process.communicate(timeout=50)  # until nobody holds the pipe
    assert (process.returncode, output) == (-signal.SIGKILL, b"")


def test_a_failure_while_the_launcher_is_watched_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher, outlet = connection()

    def fail() -> None:
        raise RuntimeError("no clock")

    monkeypatch.setattr(launcher.gone, "wait", fail)
    launcher.end_without_launcher()
    assert until(outlet) == ["the thread poseidon-orphan failed: RuntimeError: no clock"]
