"""An agent over pipes: its processes are heard and told like local ones, and none outlives its
line.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from poseidon import __version__
from poseidon.cluster.agent.__main__ import Agent
from poseidon.cluster.agent.line_channel import PipeLineChannel
from poseidon.cluster.agent.link import AgentLink, LinkSettings
from poseidon.cluster.agent.messages import Hello, Refused, Start, Welcome
from poseidon.cluster.agent.wire import REPORTS, REQUESTS
from poseidon.cluster.jobs.kill import KillTimeouts, kill_job
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registry, record_fields
from poseidon.cluster.machinefile import Host
from poseidon.cluster.plan import ProcessName, Role
from poseidon.cluster.process import OutputStream, ProcessSpec
from poseidon.errors import JobError, JobKilled
from poseidon.settings import inherited_environment
from tests.support.job_child import ENDLESS_WORKER, WORKER, child
from tests.support.live_processes import live_pids, none_left
from tests.support.polling import until
from tests.support.recording_listener import WAIT_S, RecordingListener

pytestmark = pytest.mark.processes
JOB = "far-20260101-000000-abcdef"
NAME = ProcessName(role=Role.WORKER, index=3, client=1, host="node1")
RECORD = JobRecord(
    job=JOB,
    launcher=RecordedProcess(name="launcher", host="node0", pid=1, created_s=0.0),
    hostfile="/hosts",
    hosts=(Host(id=0, address="node0", port=0), Host(id=1, address="node1", port=0)),
    output="/output",
    started_s=1.0,
)
OUTLIVES_SIGTERM = "signal.signal(signal.SIGTERM, lambda *_: None)\nsay('ready')\nforever()\n"


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


@contextmanager
def linked(home: Path, **settings: float) -> Iterator[tuple[AgentLink, subprocess.Popen[bytes]]]:
    with agent(home) as process:
        assert process.stdin is not None and process.stdout is not None
        link = AgentLink(
            PipeLineChannel(process.stdout, process.stdin), "ml@node1", LinkSettings(**settings)
        )
        link.connect(record_fields(RECORD))
        try:
            yield link, process
        finally:
            link.close()
            link.close()


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
        recorded = psutil.Process(process.pid)
        assert abs(recorded.create_time() - process.created_s) < 1e-6
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
        assert listener.until("exited")[0] == ("ready", {"event": "ready"})


def test_the_interpreter_is_the_agents_own(tmp_path: Path) -> None:
    with linked(tmp_path) as (link, _):
        listener = RecordingListener()
        spec = ProcessSpec(name=NAME, argv=(sys.executable, "-c", "print('here')"), first_line=b"")
        link.start(spec, listener)
        assert ("log", "here") in listener.until("exited")


def test_what_cannot_be_started(tmp_path: Path) -> None:
    with linked(tmp_path) as (link, _):
        spec = ProcessSpec(name=NAME, argv=("/no/such/program",), first_line=b"")
        with pytest.raises(JobError, match=r"ml@node1: cannot start worker 3 .*'/no/such/program'"):
            link.start(spec, RecordingListener())


def test_signals(tmp_path: Path) -> None:
    with linked(tmp_path) as (link, _):
        for script, end, status in (
            (ENDLESS_WORKER, "terminate", -15),
            (OUTLIVES_SIGTERM, "kill", -9),
        ):
            listener = RecordingListener()
            process = link.start(_spec(script), listener)
            listener.until("ready")
            getattr(process, end)()
            assert listener.until("exited")[-1] == ("exited", status)


def test_the_host_has_the_job_on_record_while_it_runs(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    with linked(tmp_path) as (link, process):
        far = link.start(_spec(ENDLESS_WORKER), RecordingListener())
        record = registry.read(JOB)
        assert record is not None
        assert (record.launcher.pid, record.hostfile, record.hosts) == (
            process.pid,
            "/hosts",
            RECORD.hosts,
        )
        assert [(entry.name, entry.host, entry.pid) for entry in record.processes] == [
            (NAME.describe(), "127.0.0.1", far.pid)
        ]
    assert registry.jobs() == ()


def test_the_record_of_a_launcher_on_the_same_host_stays(tmp_path: Path) -> None:
    Registry(tmp_path).write(RECORD)
    with linked(tmp_path) as (link, _):
        link.start(_spec(ENDLESS_WORKER), RecordingListener())
    assert Registry(tmp_path).read(JOB) == RECORD


@pytest.mark.parametrize("end", ["line", "SIGTERM", "close"])
def test_no_process_outlives_the_agents_line(tmp_path: Path, end: str) -> None:
    with linked(tmp_path, grace_s=0.2) as (link, process):
        pids = []
        for script in (ENDLESS_WORKER, OUTLIVES_SIGTERM):
            listener = RecordingListener()
            pids.append(link.start(_spec(script), listener).pid)
            listener.until("ready")
        assert len(live_pids(pids)) == 2
        if end == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        elif end == "line":
            assert process.stdin is not None
            process.stdin.close()
        else:
            link.close()
        process.wait(WAIT_S)
        assert none_left(pids)


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
        assert (reported["message"], reported["unwanted"]) == (
            "ml@node1: the job was killed there; the job was stopped",
            True,
        )
        with pytest.raises(JobKilled, match="ml@node1: the job was killed there"):
            link.start(_spec(ENDLESS_WORKER), RecordingListener())


def test_a_launcher_that_falls_silent_ends_the_job(tmp_path: Path) -> None:
    with agent(tmp_path) as process:
        assert process.stdin is not None and process.stdout is not None
        greeting = Hello(
            protocol=1, version="0.1.0", record=record_fields(RECORD), silence_s=0.5, grace_s=0.1
        )
        process.stdin.write(REQUESTS.encode(greeting) + b"\n")
        process.stdin.flush()
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
        assert str(event["message"]).startswith("ml@node1: the channel to it")
        assert far.poll() == 1
        with pytest.raises(JobError, match="ml@node1: the channel to it"):
            link.start(_spec(WORKER), RecordingListener())
        psutil.Process(far.pid).kill()  # what its dead agent could not end


def test_an_agent_that_falls_silent_is_a_failure_of_its_processes(tmp_path: Path) -> None:
    with linked(tmp_path, silence_s=0.2) as (link, process):
        listener = RecordingListener()
        link.start(_spec("say('ready')\nforever()\n"), listener)
        listener.until("ready")
        process.send_signal(signal.SIGSTOP)
        *_, (kind, event), _ = listener.until("exited")
        process.send_signal(signal.SIGCONT)
        assert kind == "error" and isinstance(event, dict)
        assert "it has sent nothing for 0.2 s" in str(event["message"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"nonsense", "not a message"),
        (b'{"kind": "Heartbeat"}', "a request before Hello"),
        (REQUESTS.encode(Hello(protocol=1, version="9.9", record={}, silence_s=1, grace_s=1)), "the launcher is 9.9"),
        (REQUESTS.encode(Hello(protocol=1, version="0.1.0", record={}, silence_s=1, grace_s=1)), "cannot be read"),
    ],
)  # fmt: skip
def test_what_no_agent_obeys(tmp_path: Path, line: bytes, words: str) -> None:
    with agent(tmp_path) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(line + b"\n")
        process.stdin.flush()
        report = REPORTS.decode(process.stdout.readline())
        assert words in getattr(report, "message", "")
        assert process.wait(WAIT_S) == 1


class FakeLauncher:
    """A launcher's channel that sends lines and takes reports, and fails or blocks on demand."""

    def __init__(self, *lines: bytes) -> None:
        self.lines: queue.Queue[bytes | Exception | None] = queue.Queue()
        for line in lines:
            self.lines.put(line)
        self.reports: queue.Queue[bytes] = queue.Queue()
        self.send_error: Exception | None = None
        self.accepts = threading.Event()
        self.accepts.set()

    def send(self, line: bytes) -> None:
        self.accepts.wait()
        if self.send_error is not None:
            raise self.send_error
        self.reports.put(line)

    def receive(self) -> bytes | None:
        line = self.lines.get()
        if isinstance(line, Exception):
            raise line
        return line

    def close(self) -> None:
        self.lines.put(None)


HELLO = REQUESTS.encode(
    Hello(
        protocol=1, version=__version__, record=record_fields(RECORD), silence_s=600.0, grace_s=1.0
    )
)


def _served(launcher: FakeLauncher, home: Path) -> tuple[Agent, threading.Thread, list[int]]:
    served, codes = Agent(launcher, JOB, Registry(home)), list[int]()
    thread = threading.Thread(target=lambda: codes.append(served.serve()), name="agent")
    thread.start()
    assert isinstance(REPORTS.decode(launcher.reports.get(timeout=WAIT_S)), Welcome)
    return served, thread, codes


@pytest.fixture
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that sends them notices with the next one that the agent is to end."""
    monkeypatch.setattr("poseidon.cluster.agent.__main__.HEARTBEAT_S", 0.1)


@pytest.mark.usefixtures("frequent_heartbeats")
@pytest.mark.parametrize("end", ["send", "receive"])
def test_any_exception_of_the_channel_ends_the_agent(tmp_path: Path, end: str) -> None:
    launcher = FakeLauncher(HELLO)
    _, thread, codes = _served(launcher, tmp_path)
    if end == "send":
        launcher.send_error = RuntimeError("no more")
    else:
        launcher.lines.put(RuntimeError("no more"))
    thread.join(WAIT_S / 2)
    assert codes == [1]
    launcher.close()


@pytest.mark.usefixtures("frequent_heartbeats")
def test_a_launcher_that_reads_nothing_does_not_keep_a_killed_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poseidon.cluster.agent.__main__.MAX_QUEUED", 1)
    launcher = FakeLauncher(HELLO)
    served, thread, codes = _served(launcher, tmp_path)
    launcher.accepts.clear()
    served.report(Refused(id=0, message="is being sent"))
    served.report(Refused(id=0, message="waits"))
    served.stop(killed_by_user=True)
    thread.join(WAIT_S / 2)
    ended = list(codes)
    launcher.accepts.set()
    launcher.close()
    thread.join(WAIT_S)
    assert ended == [1]


@pytest.mark.usefixtures("frequent_heartbeats")
def test_a_launcher_that_reads_nothing_does_not_keep_an_agent_from_its_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poseidon.cluster.agent.__main__.MAX_QUEUED", 1)
    launcher = FakeLauncher(HELLO)
    served, thread, codes = _served(launcher, tmp_path)
    launcher.accepts.clear()
    served.report(Refused(id=0, message="is being sent"))
    served.report(Refused(id=0, message="waits"))
    start = Start(id=7, name=NAME, argv=("/no/such/program",), environment={}, first_line="")
    launcher.lines.put(REQUESTS.encode(start))
    until(launcher.lines.empty, "the request was not taken", WAIT_S)
    time.sleep(0.3)  # the loop waits with its answer
    served.stop()
    thread.join(WAIT_S / 2)
    ended = list(codes)
    launcher.accepts.set()
    launcher.close()
    thread.join(WAIT_S)
    assert ended == [1]
