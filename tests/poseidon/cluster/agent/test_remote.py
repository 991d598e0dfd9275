"""An agent as its launcher uses it: whatever fails there reaches the processes' listeners, and who
waits for an answer, at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from poseidon.cluster.agent.messages import (
    AGENT_ITSELF,
    REPORTS,
    REQUESTS,
    AgentHello,
    AgentWelcome,
    Answer,
    Ask,
    Content,
    EndAll,
    Exited,
    Heartbeat,
    KilledByUser,
    OutputReport,
    Put,
    ReadFile,
    Refused,
    Register,
    Report,
    Request,
    Service,
    Shutdown,
    Signaled,
    Started,
    StartProcess,
)
from poseidon.cluster.agent.remote import PART_BYTES, AgentTimeouts, RemoteAgent
from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess
from poseidon.cluster.process import OutputStream, ProcessSpec
from poseidon.errors import JobError
from tests.support.polling import until
from tests.support.recording_listener import FailingListener, RecordingListener

NAME = ProcessName(role=Role.WORKER, index=0, client=0, host="node1")
SPEC = ProcessSpec(name=NAME, argv=("true",), first_line=b"{}")
# No silence is noticed before the time limit of a test.
RECORD = JobRecord(
    job="far",
    launcher=RecordedProcess(name="launcher", host="127.0.0.1", pid=1, created="0.0"),
    hostfile=None,
    hosts=(),
    output="/out",
    started_s=0.0,
)
PATIENT = AgentTimeouts(silence_s=300.0)
LIMIT_S = 10.0


class FakeChannel:
    """A channel to an agent that answers all but `Ask`, and fails on demand."""

    def __init__(self) -> None:
        self.messages: queue.Queue[bytes | None] = queue.Queue()
        self.requests: list[Request] = []
        self.file = b""
        self.refusal = ""
        self.send_error: Exception | None = None
        self.receive_error: Exception | None = None
        self.close_error: Exception | None = None

    def report(self, report: Report) -> None:
        self.messages.put(REPORTS.encode(report))

    def send(self, message: bytes) -> None:
        if self.send_error is not None:
            raise self.send_error
        request = REQUESTS.decode(message)
        if not isinstance(request, Heartbeat):
            self.requests.append(request)
        if isinstance(request, Shutdown):
            self.messages.put(None)
        elif (report := self.answer(request)) is not None:
            self.report(report)

    def answer(self, request: Request) -> Report | None:
        if isinstance(request, AgentHello):
            return AgentWelcome(cores=8, scratch="/tmp/x")
        if isinstance(request, Put | ReadFile) and self.refusal:
            return Refused(id=request.id, message=self.refusal)
        if isinstance(request, StartProcess):
            return Started(id=request.id, pid=7, created="1.0")
        if isinstance(request, ReadFile):
            part = self.file[request.offset : request.offset + request.size]
            return Content(id=request.id, size=len(self.file), content=part)
        if isinstance(request, Put):
            self.file = self.file[: request.offset] + request.content
            return Answer(id=request.id, answer={})
        return Answer(id=request.id, answer={}) if isinstance(request, EndAll) else None

    def asked(self) -> Ask:
        """The question that waits for its answer."""

        def questions() -> list[Ask]:
            return [request for request in self.requests if isinstance(request, Ask)]

        until(lambda: bool(questions()), "nothing was asked", LIMIT_S)
        return questions()[-1]

    def receive(self) -> bytes | None:
        message = self.messages.get()
        if self.receive_error is not None:
            raise self.receive_error
        return message

    def close(self) -> None:
        self.messages.put(None)
        if self.close_error is not None:
            raise self.close_error


@pytest.fixture(autouse=True)
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that sends them notices the loss with the next one, and `close` waits for it."""
    monkeypatch.setattr("poseidon.cluster.agent.remote.HEARTBEAT_S", 0.1)


def start(
    channel: FakeChannel, *listeners: RecordingListener
) -> tuple[RemoteAgent, list[RemoteProcess]]:
    agent = RemoteAgent(channel, "ml@node1", PATIENT)
    agent.connect()
    return agent, [agent.start(SPEC, listener) for listener in listeners]


def loss(listener: RecordingListener) -> str:
    """The message of the error that comes before the exit."""
    *_, (kind, event), (_, status) = listener.until("exited", LIMIT_S)
    assert kind == "error" and status == 1 and isinstance(event, dict) and event["host_lost"]
    return str(event["message"])


def test_a_listener_that_fails_is_the_loss_of_the_agent() -> None:
    channel, other = FakeChannel(), RecordingListener()
    agent, (first, _) = start(channel, FailingListener(), other)
    channel.report(OutputReport(id=first.id, stream=OutputStream.STDERR, text="text\n"))
    assert "no room for a line" in loss(other)
    agent.close()


class DeafListener(RecordingListener):
    """Cannot take anything but the exit."""

    def event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        raise RuntimeError("no event is taken")


def test_a_listener_that_fails_does_not_keep_the_others_from_their_report() -> None:
    channel, first, second = FakeChannel(), DeafListener(), RecordingListener()
    agent, _ = start(channel, first, second)
    channel.messages.put(None)
    assert "has ended" in loss(second)
    assert first.until("exited", LIMIT_S)[-1] == ("exited", 1)
    agent.close()


@pytest.mark.parametrize("end", ["send_error", "receive_error"])
@pytest.mark.parametrize("error", [EOFError, OSError])
def test_any_exception_of_the_channel_is_the_loss_of_the_agent(
    end: str, error: type[Exception]
) -> None:
    channel, listener = FakeChannel(), RecordingListener()
    agent, (process,) = start(channel, listener)
    setattr(channel, end, error("the transport is gone"))
    if end == "receive_error":
        channel.report(OutputReport(id=process.id, stream=OutputStream.STDERR, text="text\n"))
    assert "the transport is gone" in loss(listener)
    agent.close()


class _ClosedMeanwhile(FakeChannel):
    """What was received waits until the sender has found it closed."""

    def __init__(self) -> None:
        super().__init__()
        self.found_closed = threading.Event()

    def send(self, message: bytes) -> None:
        if isinstance(REQUESTS.decode(message), Register):
            self.found_closed.set()
            raise OSError("it is closed")
        super().send(message)

    def receive(self) -> bytes | None:
        message = super().receive()
        if message == REPORTS.encode(KilledByUser()):
            assert self.found_closed.wait(LIMIT_S)
        return message


def test_what_came_before_the_channel_was_found_closed_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("poseidon.cluster.agent.remote.HEARTBEAT_S", 300.0)
    channel, listener = _ClosedMeanwhile(), RecordingListener()
    agent, _ = start(channel, listener)
    channel.report(KilledByUser())
    agent.register(RECORD)
    assert "the job was killed there" in loss(listener)
    assert agent.killed_by_user
    agent.register(RECORD)  # wakes the sender
    monkeypatch.setattr("poseidon.cluster.agent.remote.HEARTBEAT_S", LIMIT_S)
    agent.close()


def test_a_channel_that_cannot_be_closed_does_not_hide_the_loss() -> None:
    channel, listener = FakeChannel(), RecordingListener()
    agent, _ = start(channel, listener)
    channel.close_error = EOFError()
    channel.messages.put(None)
    assert "has ended" in loss(listener)
    channel.close_error = None
    agent.close()


def test_what_is_no_report_is_the_loss_of_the_agent() -> None:
    channel, listener = FakeChannel(), RecordingListener()
    agent, _ = start(channel, listener)
    channel.messages.put(b"Welcome to node1!")
    assert "what answers there is not an agent of this job (not a message: b'Wel" in loss(listener)
    agent.close()


def test_an_exit_after_the_loss_is_not_reported() -> None:
    channel, listener = FakeChannel(), RecordingListener()
    agent, (process,) = start(channel, listener)
    channel.report(Exited(id=process.id, status=3))
    assert listener.until("exited", LIMIT_S)[-1] == ("exited", 3)
    agent.close()
    assert listener.received.empty()


class _Forgetful(FakeChannel):
    def answer(self, request: Request) -> Report | None:
        """Report the exit of a process whose start was not reported."""
        if isinstance(request, StartProcess):
            return Exited(id=request.id, status=3)
        return super().answer(request)


def test_a_process_may_end_before_its_start_is_reported() -> None:
    channel, listener = _Forgetful(), RecordingListener()
    agent, (process,) = start(channel, listener)  # which waits for the start
    assert process.poll() == 3
    agent.close()


class _Silent(FakeChannel):
    def send(self, message: bytes) -> None:
        """Take a message and answer nothing."""


def test_an_agent_that_does_not_answer() -> None:
    agent = RemoteAgent(_Silent(), "ml@node2", AgentTimeouts(hello_s=0.1))
    with pytest.raises(JobError, match=r"^ml@node2: its agent did not answer within 0.1 s$"):
        agent.connect()
    agent.close()


class _Refusing(FakeChannel):
    def answer(self, request: Request) -> Report | None:
        return Refused(id=AGENT_ITSELF, message="no\x1b Poseidon there")


def test_an_agent_that_says_why_it_cannot_serve() -> None:
    agent = RemoteAgent(_Refusing(), "ml@node2")
    with pytest.raises(JobError, match=r"^ml@node2: no\\x1b Poseidon there$"):
        agent.connect()
    assert agent.refused
    agent.close()


def test_what_is_known_of_a_host() -> None:
    channel = FakeChannel()
    agent, _ = start(channel)
    assert (agent.welcome.cores, agent.welcome.scratch, agent.lost) == (8, "/tmp/x", None)
    agent.register(RECORD)
    agent.end_all()
    assert channel.requests[1] == Register(record=RECORD)
    assert isinstance(channel.requests[2], EndAll)
    assert not agent.closed
    agent.close(75)
    assert channel.requests[-1] == Shutdown(status=75)
    assert agent.closed


def test_a_heard_agent_is_one_that_reports() -> None:
    channel = FakeChannel()
    agent, _ = start(channel)
    assert not agent.is_heard(0.05)
    beat = threading.Timer(0.05, channel.report, [Heartbeat()])
    beat.start()
    assert agent.is_heard(LIMIT_S)
    agent.close()


def test_who_waits_for_an_agent_to_be_heard_learns_of_its_loss_at_once() -> None:
    channel, answers = FakeChannel(), queue.Queue[bool]()
    agent, _ = start(channel)
    waiter = threading.Thread(target=lambda: answers.put(agent.is_heard(300.0)), daemon=True)
    waiter.start()
    with pytest.raises(queue.Empty):
        answers.get(timeout=0.1)
    channel.messages.put(None)
    assert not answers.get(timeout=LIMIT_S)
    agent.close()


def test_a_signal_of_the_scheduler_is_handed_on() -> None:
    signals: queue.Queue[str] = queue.Queue()
    channel = FakeChannel()
    agent = RemoteAgent(channel, "rank 1", PATIENT, on_signal=lambda _, name: signals.put(name))
    agent.connect()
    channel.report(Signaled(signal="SIGUSR1"))
    assert signals.get(timeout=LIMIT_S) == "SIGUSR1"
    agent.close()


@pytest.mark.parametrize("leaves", [True, False])
def test_a_host_that_is_asked_to_end_leaves_or_is_lost(leaves: bool) -> None:
    channel, listener = FakeChannel(), RecordingListener()
    agent, _ = start(channel, listener)
    agent.leave = lambda: leaves
    channel.report(Signaled(signal="SIGTERM"))
    if leaves:
        channel.report(Heartbeat())
        assert agent.is_heard(LIMIT_S)
    else:
        why = "ml@node1: its agent was ended by SIGTERM; the job was stopped"
        assert loss(listener) == why
    agent.close()


def test_a_host_is_killed_by_the_user_after_it_was_asked_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launcher that is stopped meanwhile finds both."""
    monkeypatch.setattr("poseidon.cluster.agent.remote.HEARTBEAT_S", 300.0)
    channel, listener = FakeChannel(), RecordingListener()
    agent, _ = start(channel, listener)
    channel.report(Signaled(signal="SIGTERM"))
    channel.report(KilledByUser())
    assert "the job was killed there" in loss(listener)
    assert agent.killed_by_user
    agent.register(RECORD)  # wakes the sender
    monkeypatch.setattr("poseidon.cluster.agent.remote.HEARTBEAT_S", LIMIT_S)
    agent.close()


def _ask(agent: RemoteAgent, timeout_s: float = LIMIT_S) -> queue.Queue[object]:
    """Ask on a thread; the answer or the error comes through the queue."""
    outcome: queue.Queue[object] = queue.Queue()

    def ask() -> None:
        try:
            outcome.put(agent.ask(Service.CHECK, {"clients": []}, timeout_s))
        except JobError as error:
            outcome.put(str(error))

    threading.Thread(target=ask, name="ask", daemon=True).start()
    return outcome


@pytest.mark.parametrize("end", ["answer", "refusal", "another's answer", "loss"])
def test_a_question_has_one_answer(end: str) -> None:
    channel = FakeChannel()
    agent, _ = start(channel)
    outcome = _ask(agent, 0.3 if end == "another's answer" else LIMIT_S)
    question = channel.asked()
    assert (question.service, question.request) == (Service.CHECK, {"clients": []})
    if end == "answer":
        channel.report(Answer(id=question.id, answer={"cores": 8}))
        assert outcome.get(timeout=LIMIT_S) == {"cores": 8}
    elif end == "refusal":
        channel.report(Refused(id=question.id, message="no\x1b such check"))
        assert outcome.get(timeout=LIMIT_S) == r"ml@node1: no\x1b such check"
    elif end == "loss":
        channel.messages.put(None)
        assert outcome.get(timeout=LIMIT_S) == "ml@node1: the connection to it has ended"
        with pytest.raises(JobError, match="ml@node1: the connection to it has ended"):
            agent.ask(Service.CHECK, {})
    else:
        channel.report(Answer(id=question.id + 100, answer={}))
        assert outcome.get(timeout=LIMIT_S) == "ml@node1: no answer within 0.3 s"
    agent.close()


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, 40 * PART_BYTES + 7])
def test_files_go_and_come_in_parts(tmp_path: Path, size: int) -> None:
    content = bytes(number % 251 for number in range(size))
    (tmp_path / "file").write_bytes(content)
    channel, sent, parts = FakeChannel(), list[int](), list[bytes]()
    agent, _ = start(channel)
    agent.send_file(tmp_path / "file", "there", 0, sent.append)
    assert (channel.file, sum(sent)) == (content, size)
    assert agent.read_file("there", parts.append) == size
    assert b"".join(parts) == content
    agent.close()


def test_an_answer_of_another_kind_is_the_loss_of_the_agent() -> None:
    channel = FakeChannel()
    agent, _ = start(channel)
    outcome = _ask(agent, LIMIT_S)
    channel.report(Content(id=channel.asked().id, size=1, content=b"x"))
    assert "not an agent of this job (Content in place of Answer)" in str(
        outcome.get(timeout=LIMIT_S)
    )
    agent.close()


def test_a_file_is_continued(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    channel, sent = FakeChannel(), list[int]()
    agent, _ = start(channel)
    channel.file = b"0123"
    agent.send_file(tmp_path / "file", "there", 4, sent.append)
    agent.send_file(tmp_path / "file", "there", 10, sent.append)  # all is there
    assert (channel.file, sent) == (b"0123456789", [6])
    agent.close()


def test_files_that_cannot_be_copied(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 * PART_BYTES))
    channel = FakeChannel()
    agent, _ = start(channel)
    channel.file = bytes(200)
    with pytest.raises(JobError, match="ml@node1: there has 200 bytes; expected at most 100"):
        agent.read_file("there", lambda _: None, limit=100)
    channel.file = bytes(3 * PART_BYTES)

    def shorten(part: bytes) -> None:
        channel.file = channel.file[: len(channel.file) // 2]

    channel.file = bytes(40 * PART_BYTES)
    with pytest.raises(JobError, match="ml@node1: there changed while it was copied"):
        agent.read_file("there", shorten)
    with pytest.raises(FileNotFoundError):
        agent.send_file(tmp_path / "none", "there", 0, lambda _: None)
    channel.refusal = "No space left on device"
    with pytest.raises(JobError, match="ml@node1: No space left on device"):
        agent.send_file(tmp_path / "file", "there", 0, lambda _: None)
    with pytest.raises(JobError, match="ml@node1: No space left on device"):
        agent.read_file("there", lambda _: None)
    channel.messages.put(None)
    with pytest.raises(JobError, match="ml@node1: the connection to it has ended"):
        agent.send_file(tmp_path / "file", "there", 0, lambda _: None)
    agent.close()


def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    agent, _ = start(FakeChannel(), RecordingListener())
    agent.close()
    agent.close()
    assert set(threading.enumerate()) <= before
