"""The launcher's end of the channel to an agent: whatever fails there reaches the processes'
listeners at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

import pytest

from poseidon.cluster.agent.link import AgentLink, LinkSettings
from poseidon.cluster.agent.messages import (
    Exited,
    Hello,
    OutputReport,
    Report,
    Shutdown,
    Start,
    Started,
    Welcome,
)
from poseidon.cluster.agent.wire import REPORTS, REQUESTS
from poseidon.cluster.plan import ProcessName, Role
from poseidon.cluster.process import OutputStream, ProcessSpec
from poseidon.errors import JobError
from tests.support.recording_listener import RecordingListener

NAME = ProcessName(role=Role.WORKER, index=0, client=0, host="node1")
SPEC = ProcessSpec(name=NAME, argv=("true",), first_line=b"{}")
# No silence is noticed before the time limit of a test.
PATIENT = LinkSettings(silence_s=300.0)
LIMIT_S = 10.0


class FakeChannel:
    """A channel to an agent that answers `Hello` and `Start`, and fails on demand."""

    def __init__(self) -> None:
        self.lines: queue.Queue[bytes | None] = queue.Queue()
        self.send_error: Exception | None = None
        self.receive_error: Exception | None = None
        self.close_error: Exception | None = None

    def report(self, report: Report) -> None:
        self.lines.put(REPORTS.encode(report))

    def send(self, line: bytes) -> None:
        if self.send_error is not None:
            raise self.send_error
        request = REQUESTS.decode(line)
        if isinstance(request, Hello):
            self.report(
                Welcome(protocol=1, version=request.version, pid=1, cores=1, scratch="/tmp/x")
            )
        elif isinstance(request, Start):
            self.report(Started(id=request.id, pid=7, created_s=1.0))
        elif isinstance(request, Shutdown):
            self.lines.put(None)

    def receive(self) -> bytes | None:
        line = self.lines.get()
        if self.receive_error is not None:
            raise self.receive_error
        return line

    def close(self) -> None:
        self.lines.put(None)
        if self.close_error is not None:
            raise self.close_error


@pytest.fixture(autouse=True)
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that sends them notices the loss with the next one, and `close` waits for it."""
    monkeypatch.setattr("poseidon.cluster.agent.link.HEARTBEAT_S", 0.1)


def start(channel: FakeChannel, *listeners: RecordingListener) -> AgentLink:
    link = AgentLink(channel, "ml@node1", PATIENT)
    link.connect({})
    for listener in listeners:
        link.start(SPEC, listener)
    return link


def loss(listener: RecordingListener) -> str:
    """The message of the error that comes before the exit."""
    *_, (kind, event), (_, status) = listener.until("exited", LIMIT_S)
    assert kind == "error" and status == 1 and isinstance(event, dict) and event["host_lost"]
    return str(event["message"])


class FailingListener(RecordingListener):
    """Cannot take a line of text."""

    def output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        raise RuntimeError("no room for a line")


def test_a_listener_that_fails_is_the_loss_of_the_agent() -> None:
    channel, other = FakeChannel(), RecordingListener()
    link = start(channel, FailingListener(), other)
    channel.report(OutputReport(id=0, stream=OutputStream.STDERR, text="text\n"))
    assert "no room for a line" in loss(other)
    link.close()


class DeafListener(RecordingListener):
    """Cannot take anything but the exit."""

    def event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        raise RuntimeError("no event is taken")


def test_a_listener_that_fails_does_not_keep_the_others_from_their_report() -> None:
    channel, first, second = FakeChannel(), DeafListener(), RecordingListener()
    link = start(channel, first, second)
    channel.lines.put(None)
    assert "has ended" in loss(second)
    assert first.until("exited", LIMIT_S)[-1] == ("exited", 1)
    link.close()


@pytest.mark.parametrize("end", ["send_error", "receive_error"])
def test_any_exception_of_the_channel_is_the_loss_of_the_agent(end: str) -> None:
    channel, listener = FakeChannel(), RecordingListener()
    link = start(channel, listener)
    setattr(channel, end, EOFError("the transport is gone"))
    if end == "receive_error":
        channel.report(OutputReport(id=0, stream=OutputStream.STDERR, text="text\n"))
    assert "the transport is gone" in loss(listener)
    link.close()


def test_a_channel_that_cannot_be_closed_does_not_hide_the_loss() -> None:
    channel, listener = FakeChannel(), RecordingListener()
    link = start(channel, listener)
    channel.close_error = EOFError()
    channel.lines.put(None)
    assert "has ended" in loss(listener)
    channel.close_error = None
    link.close()


def test_an_exit_after_the_loss_is_not_reported() -> None:
    channel, listener = FakeChannel(), RecordingListener()
    link = start(channel, listener)
    channel.report(Exited(id=0, status=3))
    assert listener.until("exited", LIMIT_S)[-1] == ("exited", 3)
    link.close()
    assert listener.received.empty()
    with pytest.raises(JobError):
        AgentLink(_Silent(), "ml@node2", LinkSettings(hello_s=0.1)).connect({})


class _Silent(FakeChannel):
    def send(self, line: bytes) -> None:
        """Take a line and answer nothing."""


def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    start(FakeChannel(), RecordingListener()).close()
    assert set(threading.enumerate()) <= before
