"""An agent and its host: processes are heard and told as if they were local, and none outlives the
channel; files and checks travel over the same channel.
"""

from __future__ import annotations

import errno
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from poseidon import __version__
from poseidon.base.settings import inherited_environment
from poseidon.cluster.agent.agent import EndProcesses
from poseidon.cluster.agent.host import Agent
from poseidon.cluster.agent.messages import (
    AGENT_ITSELF,
    PROTOCOL,
    REPORTS,
    REQUESTS,
    AgentHello,
    AgentWelcome,
    Heartbeat,
    Refused,
    Report,
    Service,
    StartProcess,
)
from poseidon.cluster.agent.remote import AgentTimeouts, RemoteAgent
from poseidon.cluster.dial.channel import StreamChannel
from poseidon.cluster.dial.dialer import dial_here
from poseidon.cluster.host_probe import Check, HostFacts
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.jobs.kill import KillTimeouts, kill_job
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registry
from poseidon.cluster.jobs.this_host import JobList
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import OutputStream, ProcessSpec, creation
from poseidon.errors import JobError, JobKilled
from tests.support.job_child import ENDLESS_WORKER, WORKER, child
from tests.support.live_processes import live_pids, none_left
from tests.support.recording_listener import WAIT_S, RecordingListener

pytestmark = pytest.mark.processes
JOB = "far-20260101-000000-abcdef"
NAME = ProcessName(role=Role.WORKER, index=3, client=1, host="node1")
RECORD = JobRecord(
    job=JOB,
    launcher=RecordedProcess(name="launcher", host="node0", pid=1, created="0.0"),
    hostfile="/hosts",
    hosts=(Host(id=0, address="node0", port=0), Host(id=1, address="node1", port=0)),
    output="/output",
    started_s=1.0,
)
OUTLIVES_SIGTERM = "signal.signal(signal.SIGTERM, lambda *_: None)\nsay('ready')\nforever()\n"


def _hello(protocol: int = PROTOCOL, version: str = __version__, silence_s: float = 600.0) -> bytes:
    return REQUESTS.encode(
        AgentHello(protocol=protocol, version=version, silence_s=silence_s, grace_s=1.0)
    )


START = REQUESTS.encode(
    StartProcess(id=7, spec=ProcessSpec(name=NAME, argv=("/no/such/program",), first_line=b""))
)


@contextmanager
def agent(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, "-m", "poseidon.cluster.agent", "--job", JOB]
    environment = {**inherited_environment(), "POSEIDON_HOME": str(home)}
    with subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            process.wait(WAIT_S)


def _channel(process: subprocess.Popen[bytes]) -> StreamChannel:
    """The channel to an agent; it owns the pipe to the agent, and `process` the other one."""
    assert process.stdin is not None and process.stdout is not None
    outlet = os.dup(process.stdin.fileno())
    process.stdin.close()
    return StreamChannel.of_pipes(process.stdout.fileno(), outlet)


@contextmanager
def linked(home: Path, **timeouts: float) -> Iterator[tuple[RemoteAgent, subprocess.Popen[bytes]]]:
    with agent(home) as process:
        remote = RemoteAgent(_channel(process), "ml@node1", AgentTimeouts(**timeouts))
        try:
            remote.connect()
            remote.register(RECORD)
            yield remote, process
        finally:
            remote.close()
            remote.close()


def _spec(script: str, *, first_line: bytes = b"{}", **environment: str) -> ProcessSpec:
    return ProcessSpec(
        name=NAME, argv=child(script), environment=environment, first_line=first_line
    )


def test_a_process_is_heard_and_told(tmp_path: Path) -> None:
    script = "print('text', document['a'], os.environ['B'])\n" + WORKER.replace(
        'say("done")', 'say("done"); sys.exit(3)'
    )
    with linked(tmp_path) as (link, _):
        listener = RecordingListener()
        process = link.start(_spec(script, first_line=b'{"a": 5}', B="set"), listener)
        assert process.created == creation(process.pid) != ""
        listener.until("ready")
        process.send_line(b'{"do": "connect", "addresses": []}')
        heard = listener.until("exited")
        assert [kind for kind, _ in heard if kind not in ("alive", "log")] == [
            "progress",
            "progress",
            "done",
            "exited",
        ]
        assert heard[-1] == ("exited", 3)
        assert process.poll() == 3
        process.close()


def test_output_comes_from_the_stream_that_it_was_written_to(tmp_path: Path) -> None:
    script = """
os.write(int(os.environ["POSEIDON_EVENTS_FD"]), b'{"event": "ready"}\\n')
for stream, piece in ((1, b"a\\xff"), (2, b"\\r 50%"), (1, b"\\n")):
    os.write(stream, piece)
    sys.stdin.readline()
"""
    out, err = OutputStream.STDOUT, OutputStream.STDERR
    with linked(tmp_path) as (link, _):
        listener = RecordingListener()
        process = link.start(replace(_spec(script), own_stdout=True), listener)
        for expected in ((out, "a\udcff"), (err, "\r 50%"), (out, "\n")):
            assert listener.pieces.get(timeout=WAIT_S) == expected
            process.send_line(b"")
        assert ("ready", {"event": "ready"}) in listener.until("exited")  # of a pipe of its own


def test_the_interpreter_is_the_agents_own(tmp_path: Path) -> None:
    with linked(tmp_path) as (link, _):
        listener = RecordingListener()
        spec = ProcessSpec(name=NAME, argv=(sys.executable, "-c", "print('here')"), first_line=b"")
        link.start(spec, listener)
        assert ("log", "here") in listener.until("exited")


@pytest.mark.parametrize(
    ("what", "error", "why"),
    [
        ("tempfile.mkdtemp", OSError(errno.ENOSPC, "No space left", "/t"), "No space left: '/t'$"),
        ("threading.Thread.start", RuntimeError("can't start new thread"), "no more threads or"),
    ],
)
def test_an_agent_that_cannot_serve_says_why(
    monkeypatch: pytest.MonkeyPatch, what: str, error: Exception, why: str
) -> None:
    start = threading.Thread.start

    def refuse(thread: object = None, **_: object) -> None:
        if isinstance(thread, threading.Thread) and thread.name != "poseidon agent files":
            start(thread)
        else:
            raise error

    monkeypatch.setattr(what, refuse)
    with pytest.raises(JobError, match=rf"^this machine: {why}"):
        dial_here()


def test_the_host_has_the_job_on_record_while_it_runs(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    with linked(tmp_path) as (link, process):
        far = link.start(_spec(ENDLESS_WORKER), RecordingListener())
        record = registry.read(JOB)
        assert record is not None
        assert (record.launcher.pid, record.hosts) == (process.pid, RECORD.hosts)
        (entry,) = record.processes
        assert (entry.name, entry.host, entry.pid) == (NAME.describe(), "127.0.0.1", far.pid)
    assert registry.jobs() == ()


def test_the_record_of_a_launcher_on_the_same_host_stays(tmp_path: Path) -> None:
    Registry(tmp_path).write(RECORD)
    with linked(tmp_path) as (link, _):
        link.start(_spec(ENDLESS_WORKER), RecordingListener())
    assert Registry(tmp_path).read(JOB) == RECORD


@pytest.mark.parametrize("end", ["channel", "SIGTERM", "close"])
def test_no_process_outlives_the_channel(tmp_path: Path, end: str) -> None:
    with agent(tmp_path) as process:
        channel = _channel(process)
        remote = RemoteAgent(channel, "ml@node1", AgentTimeouts(grace_s=0.2))
        remote.connect()
        pids = []
        for script in (ENDLESS_WORKER, OUTLIVES_SIGTERM):
            listener = RecordingListener()
            pids.append(remote.start(_spec(script), listener).pid)
            listener.until("ready")
        assert len(live_pids(pids)) == 2
        if end == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        elif end == "channel":
            channel.close()
        else:
            remote.close()
        assert process.wait(WAIT_S) == (0 if end == "close" else 1)
        assert none_left(pids)
        assert not Path(remote.welcome.scratch).exists()
        remote.close()


def test_what_the_user_kills_on_the_host_is_told_as_that(tmp_path: Path) -> None:
    """Not as a loss, after which the job would be started again."""
    with linked(tmp_path, grace_s=0.2) as (link, process):
        listener = RecordingListener()
        link.start(_spec(ENDLESS_WORKER), listener)
        listener.until("ready")
        kill_job(JOB, Registry(tmp_path), timeouts=KillTimeouts())
        assert process.poll() is not None
        reported = listener.until("error")[-1][1]
        assert isinstance(reported, dict)
        assert "ml@node1: the job was killed there" in reported["message"] and reported["unwanted"]
        with pytest.raises(JobKilled, match="ml@node1: the job was killed there"):
            link.start(_spec(ENDLESS_WORKER), RecordingListener())


def _exchange(process: subprocess.Popen[bytes], *messages: bytes) -> Report:
    """Send messages to an agent; return its first report that is not a heartbeat or welcome."""
    channel = _channel(process)
    for message in messages:
        channel.send(message)
    while (encoded := channel.receive()) is not None:
        report = REPORTS.decode(encoded)
        if not isinstance(report, Heartbeat | AgentWelcome):
            return report
    channel.close()
    return Heartbeat()


def test_a_launcher_that_falls_silent_ends_the_job(tmp_path: Path) -> None:
    with agent(tmp_path) as process:
        assert _exchange(process, _hello(silence_s=0.5)) == Heartbeat()
        assert process.wait(WAIT_S) == 1


def test_an_agent_that_dies_is_a_failure_of_its_processes(tmp_path: Path) -> None:
    with linked(tmp_path) as (link, process):
        listener = RecordingListener()
        far = link.start(_spec(ENDLESS_WORKER), listener)
        listener.until("ready")
        process.kill()
        *_, (kind, event), (last, status) = listener.until("exited")
        assert (kind, last, status) == ("error", "exited", 1)
        assert isinstance(event, dict) and event["host_lost"]
        assert str(event["message"]).startswith("ml@node1: the connection to it")
        assert far.poll() == 1
        with pytest.raises(JobError, match="ml@node1: the connection to it"):
            link.start(_spec(WORKER), RecordingListener())
        psutil.Process(far.pid).kill()  # what its dead agent could not end


def test_an_agent_that_falls_silent_is_a_failure_of_its_processes(tmp_path: Path) -> None:
    """Its heartbeats come every two seconds."""
    with linked(tmp_path, silence_s=3.0) as (link, process):
        listener = RecordingListener()
        link.start(_spec("say('ready')\nforever()\n"), listener)
        listener.until("ready")
        process.send_signal(signal.SIGSTOP)
        *_, (kind, event), _ = listener.until("exited")
        process.send_signal(signal.SIGCONT)
        assert kind == "error" and isinstance(event, dict)
        assert "it has sent nothing for 3 s" in str(event["message"])


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([b"nonsense"], "not a message"),
        ([_hello(version="9.9")], "is installed there, and 9.9 here; install the same version"),
        ([_hello(), b'{"kind": "Register", "record": {}}'], "Register has {} as its record"),
    ],
)
def test_what_no_agent_obeys(messages: list[bytes], words: str) -> None:
    launcher = FakeLauncher(*messages)
    assert Agent(launcher).serve().status == 1
    reports = [REPORTS.decode(launcher.reports.get_nowait()) for _ in messages]
    (refused,) = [report for report in reports if not isinstance(report, AgentWelcome)]
    assert isinstance(refused, Refused) and refused.id == AGENT_ITSELF
    assert words in refused.message


class FakeLauncher:
    """A launcher's channel that sends messages and takes reports, and fails or blocks on demand."""

    def __init__(self, *messages: bytes) -> None:
        self.messages: queue.Queue[bytes | Exception | None] = queue.Queue()
        for message in messages:
            self.messages.put(message)
        self.reports: queue.Queue[bytes] = queue.Queue()
        self.send_error: Exception | None = None
        self.accepts = threading.Event()
        self.accepts.set()

    def send(self, message: bytes) -> None:
        self.accepts.wait()
        if self.send_error is not None:
            raise self.send_error
        self.reports.put(message)

    def receive(self) -> bytes | None:
        message = self.messages.get()
        if isinstance(message, Exception):
            raise message
        return message

    def close(self) -> None:
        self.messages.put(None)


class WatchedAgent(Agent):
    """An agent that notes when it waits with a report."""

    def __init__(self, channel: FakeLauncher) -> None:
        super().__init__(channel)
        self.waits = threading.Event()

    def report(self, report: Report, *, timeout_s: float = math.inf) -> bool:
        queued = super().report(report, timeout_s=timeout_s)
        if not queued:
            self.waits.set()
        return queued


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of agents in this process; they send heartbeats often: the thread that does
    notices with the next one that the agent is to end.
    """
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path))
    monkeypatch.setattr("poseidon.cluster.agent.connection.HEARTBEAT_S", 0.1)
    return tmp_path


def _served(launcher: FakeLauncher) -> tuple[WatchedAgent, threading.Thread, list[EndProcesses]]:
    served, left = WatchedAgent(launcher), list[EndProcesses]()
    thread = threading.Thread(target=lambda: left.append(served.serve()), name="agent")
    thread.start()
    assert isinstance(REPORTS.decode(launcher.reports.get(timeout=WAIT_S)), AgentWelcome)
    return served, thread, left


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("end", ["send", "receive"])
def test_any_exception_of_the_channel_ends_the_agent(end: str) -> None:
    launcher = FakeLauncher(_hello())
    _, thread, left = _served(launcher)
    if end == "send":
        launcher.send_error = RuntimeError("no more")
    else:
        launcher.messages.put(RuntimeError("no more"))
    thread.join(WAIT_S / 2)
    assert [leave.status for leave in left] == [1]
    launcher.close()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("blocked", [False, True])
def test_a_launcher_that_reads_nothing_does_not_keep_a_killed_agent(
    monkeypatch: pytest.MonkeyPatch, blocked: bool
) -> None:
    """Neither while the agent waits for requests, nor while it waits with an answer."""
    monkeypatch.setattr("poseidon.cluster.agent.connection.MAX_QUEUED", 1)
    launcher = FakeLauncher(_hello())
    served, thread, left = _served(launcher)
    launcher.accepts.clear()
    served.report(Refused(id=0, message="is being sent"))
    served.report(Refused(id=0, message="waits"))
    if blocked:
        launcher.messages.put(START)
        assert served.waits.wait(WAIT_S)
        served.stop("it was ended by SIGTERM")
    else:
        served.killed_by_user()
    thread.join(WAIT_S / 2)
    ended = [leave.status for leave in left]
    launcher.accepts.set()
    launcher.close()
    thread.join(WAIT_S)
    assert ended == [1]


@pytest.fixture
def here(home: Path) -> Iterator[RemoteAgent]:
    """An agent in this process."""
    remote = dial_here()
    yield remote
    remote.close()


def test_every_service_answers(here: RemoteAgent) -> None:
    checked = here.ask_for(HostFacts, Service.CHECK, Check())
    assert checked.problems == () and checked.torch
    assert here.ask_for(JobList, Service.LIST) == JobList()
    order = {"do": "inspect", "files": [], "folders": [], "replace": False}
    assert here.ask(Service.FILES, order) == {"files": [], "free": 0}
    assert isinstance(here.ask(Service.LINKS, {"do": "clock"})["time"], float)


def test_what_cannot_be_started_is_told(here: RemoteAgent) -> None:
    spec = ProcessSpec(name=NAME, argv=("/no/such/program",), first_line=b"")
    with pytest.raises(JobError, match=r"cannot start worker 3 .*'/no/such/program'"):
        here.start(spec, RecordingListener())


@pytest.mark.parametrize("service", list(Service))
def test_a_question_that_makes_no_sense_is_refused(here: RemoteAgent, service: Service) -> None:
    try:
        answer = here.ask(service, {"do": "dance"})
    except JobError as error:
        assert str(error).startswith("this machine: ")
    else:
        assert "problem" in str(answer)
    assert here.ask(Service.LINKS, {"do": "clock"})


def test_a_question_that_takes_long_keeps_nothing_else(
    here: RemoteAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, over = queue.Queue[object](), threading.Event()

    def probe(_: object) -> HostFacts:
        over.wait(WAIT_S)
        return HostFacts(torch="over", addresses={}, problems=())

    monkeypatch.setattr("poseidon.cluster.host_probe.answer", probe)
    asker = threading.Thread(target=lambda: answers.put(here.ask(Service.CHECK, {})))
    asker.start()
    listener = RecordingListener()
    here.start(_spec("say('ready')"), listener)
    listener.until("exited")
    assert answers.empty()
    over.set()
    assert "'torch': 'over'" in str(answers.get(timeout=WAIT_S))
    asker.join(WAIT_S)


def test_files_are_written_and_read(here: RemoteAgent, tmp_path: Path) -> None:
    content = os.urandom(300_000)
    (tmp_path / "here").write_bytes(content)
    there, parts = Path(here.welcome.scratch) / "caf\udce9 \n", list[bytes]()
    here.send_file(tmp_path / "here", str(there), 0, lambda _: None)
    assert there.read_bytes() == content
    there.write_bytes(content[:100_000] + b"spoilt")
    here.send_file(tmp_path / "here", str(there), 100_000, lambda _: None)
    assert here.read_file(str(there), parts.append) == len(content)
    assert b"".join(parts) == content


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("none", "No such file or directory"),
        ("folder", "is not a regular file|Is a directory"),
        ("pipe", "is not a regular file"),
        ("nul", "embedded null byte"),
    ],
)
def test_files_that_cannot_be_read(
    here: RemoteAgent, tmp_path: Path, kind: str, words: str
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    path = str(tmp_path / kind) if kind != "nul" else "\0"
    with pytest.raises(JobError, match=f"^this machine: .*({words})"):
        here.read_file(path, lambda _: None)


def test_files_that_cannot_be_written(here: RemoteAgent, tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(b"x")
    with pytest.raises(JobError, match=r"^this machine: No such file or directory"):
        here.send_file(tmp_path / "here", str(tmp_path / "no" / "file"), 0, lambda _: None)
    with pytest.raises(JobError, match=r"^this machine: Is a directory"):
        here.send_file(tmp_path / "here", str(tmp_path), 0, lambda _: None)


def test_only_this_user_can_enter_the_scratch_folder(here: RemoteAgent) -> None:
    assert Path(here.welcome.scratch).stat().st_mode & 0o777 == 0o700
    here.close()
    assert not Path(here.welcome.scratch).exists()


def test_one_agent_serves_one_job_after_another(here: RemoteAgent, home: Path) -> None:
    registry = Registry(home)
    for _ in range(2):
        here.register(RECORD)
        listener = RecordingListener()
        process = here.start(_spec(ENDLESS_WORKER), listener)
        listener.until("ready")
        assert registry.read(JOB) is not None
        left = Path(here.welcome.scratch) / "client_0_1" / "sockets"
        left.mkdir(parents=True)
        here.end_all()
        assert listener.until("exited")[-1] == ("exited", -15)
        assert none_left([process.pid])
        assert registry.jobs() == ()
        assert Path(here.welcome.scratch).is_dir() and not left.parent.exists()


def test_the_launcher_is_told_how_many_cpus_there_are(here: RemoteAgent) -> None:
    assert here.welcome.cores == len(os.sched_getaffinity(0))
