"""Child processes: what they say is heard in order, what they are told never blocks, nothing
outlives them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import poseidon
from poseidon.cluster.agent import child as child_module
from poseidon.cluster.agent.child import ChildProcess, ChildSettings, base_environment, start_child
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.process import OutputStream, ProcessSpec, describe_exit
from poseidon.errors import JobError
from tests.support.job_child import child
from tests.support.live_processes import live_pids, none_left
from tests.support.recording_listener import WAIT_S, RecordingListener

NAME = ProcessName(role=Role.WORKER, index=0, client=0, host="127.0.0.1")

pytestmark = pytest.mark.processes


@contextmanager
def started(
    script: str, *, first_line: bytes = b"{}", **environment: str
) -> Iterator[tuple[ChildProcess, RecordingListener]]:
    listener = RecordingListener()
    spec = ProcessSpec(
        name=NAME, argv=child(script), environment=environment, first_line=first_line
    )
    process = start_child(spec, listener)
    try:
        yield process, listener
    finally:
        process.close()
        process.close()
        assert not live_pids([process.pid])


def test_hears_events_text_and_the_exit_in_order() -> None:
    script = "print('hello'); print('{broken'); sys.stdout.flush(); say('ready'); os._exit(document['code'])"
    with started(script, first_line=b'{"code": 7}') as (process, listener):
        heard = listener.until("exited")
        assert [kind for kind, _ in heard] == ["log", "log", "ready", "exited"]
        assert [what for kind, what in heard if kind == "log"] == ["hello", "{broken"]
        assert heard[-1] == ("exited", 7)
        assert process.poll() == 7


def test_stderr_is_text_whatever_it_holds() -> None:
    with started(r"os.write(2, b'a\xff\r\n{\"event\": \"x\"}\nlast')") as (_, listener):
        assert [what for kind, what in listener.until("exited") if kind == "log"] == [
            "a\udcff",
            '{"event": "x"}',
            "last",
        ]


OUT, ERR = OutputStream.STDOUT, OutputStream.STDERR
PIECES = {
    True: [(OUT, "a"), (ERR, "\r 50%"), (OUT, "\udcff"), (OUT, "\u00e9\n"), (ERR, "\r\n")],
    False: [(ERR, "\r 50%"), (ERR, "a\udcff\u00e9\n"), (ERR, "\r\n")],
}


@pytest.mark.parametrize("own_stdout", [True, False])
def test_output_comes_as_it_is_written(own_stdout: bool) -> None:
    """Each piece is heard before the next one is written.

    Standard output that has events comes by lines.
    """
    script = """
events = int(os.environ.get("POSEIDON_EVENTS_FD", 1))
os.write(events, b'{"event": "ready"}\\n')
for stream, piece in ((1, b"a"), (2, b"\\r 50%"), (1, b"\\xff\\xc3"), (1, b"\\xa9\\n"), (2, b"\\r\\n")):
    os.write(stream, piece)
    if stream == 2 or events > 1 or piece.endswith(b"\\n"):
        sys.stdin.readline()
"""
    listener = RecordingListener()
    spec = ProcessSpec(name=NAME, argv=child(script), first_line=b"{}", own_stdout=own_stdout)
    process = start_child(spec, listener)
    try:
        for expected in PIECES[own_stdout]:
            assert listener.pieces.get(timeout=WAIT_S) == expected
            process.send_line(b"")
        assert ("ready", {"event": "ready"}) in listener.until("exited")
    finally:
        process.close()


@pytest.mark.parametrize("own_stdin", [True, False])
def test_one_child_may_read_the_launchers_standard_input(own_stdin: bool) -> None:
    script = """
fd = os.environ.get("POSEIDON_STDIN_FD")
say("heard", text=os.read(int(fd), 9).decode() if fd else None)
"""
    listener, (theirs, ours) = RecordingListener(), os.pipe()
    spec = ProcessSpec(name=NAME, argv=child(script), first_line=b"{}", own_stdin=own_stdin)
    process = start_child(spec, listener, ChildSettings(stdin=theirs))
    try:
        os.write(ours, b"c\n")
        expected = "c\n" if own_stdin else None
        assert listener.until("heard")[-1] == ("heard", {"event": "heard", "text": expected})
    finally:
        process.close()
        os.close(ours)
        os.close(theirs)


def test_commands_and_environment_arrive() -> None:
    script = (
        "say('env', value=os.environ['POSEIDON_TEST'])\nfor c in commands(): say('got', do=c['do'])"
    )
    with started(script, POSEIDON_TEST="x") as (process, listener):
        process.send_line(b'{"do": "snapshot"}')
        assert [kind for kind, _ in listener.until("got")] == ["env", "got"]


def test_sending_never_blocks() -> None:
    # The child reads nothing beyond the first line; the pipe holds far less than this.
    with started("say('ready'); forever()", first_line=b"{}") as (process, listener):
        listener.until("ready")
        for _ in range(1000):
            process.send_line(b"x" * 65536)
        process.kill()
        assert listener.until("exited")[-1] == ("exited", -9)


def test_a_large_document_arrives() -> None:
    with started("say('ready', size=len(document))", first_line=b'"' + b"x" * (1 << 22) + b'"') as (
        _,
        listener,
    ):
        assert listener.until("ready")[-1][1] == {"event": "ready", "size": 1 << 22}


def test_terminate_reaches_a_stopped_child() -> None:
    script = "say('ready')\nos.kill(os.getpid(), signal.SIGSTOP)\nforever()"
    with started(script) as (process, listener):
        listener.until("ready")
        process.terminate()
        assert listener.until("exited")[-1] == ("exited", -15)


@pytest.fixture
def ignoring_sigterm() -> Iterator[None]:
    """This process as `poseidon worker` starts agents: it ignores SIGTERM, and so do its
    children.
    """
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("ignoring_sigterm")
def test_terminate_kills_a_child_that_was_started_ignoring_it() -> None:
    with started("say('ready')\nforever()") as (process, listener):
        listener.until("ready")
        process.terminate()
        assert listener.until("exited")[-1] == ("exited", -9)


@pytest.mark.usefixtures("ignoring_sigterm")
def test_terminate_leaves_a_child_its_time_that_was_started_ignoring_it_and_handles_it() -> None:
    script = "signal.signal(signal.SIGTERM, lambda *_: os._exit(4))\nsay('ready')\nforever()"
    with started(script) as (process, listener):
        listener.until("ready")
        process.terminate()
        assert listener.until("exited")[-1] == ("exited", 4)


def test_terminate_leaves_a_child_its_time_that_ignores_it_by_itself() -> None:
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('saves')\nfor c in commands(): os._exit(0)"
    with started(script) as (process, listener):
        listener.until("saves")
        process.terminate()
        process.send_line(b'{"do": "stop"}')
        assert listener.until("exited")[-1] == ("exited", 0)


def test_terminate_leaves_a_child_that_handles_it_its_time() -> None:
    script = "signal.signal(signal.SIGTERM, lambda *_: (say('saved'), os._exit(4)))\nsay('ready')\nforever()"
    with started(script) as (process, listener):
        listener.until("ready")
        process.terminate()
        assert [kind for kind, _ in listener.until("exited")] == ["saved", "exited"]


def test_what_a_child_leaves_behind_ends_with_it() -> None:
    script = """
child = os.fork()
if child:
    say("ready", child=child)
    os._exit(0)
forever()
"""
    with started(script) as (_, listener):
        event = listener.until("exited")[0][1]
        assert isinstance(event, dict)
        assert none_left([event["child"]])


class SlowListener(RecordingListener):
    """Takes each piece of output only when it has waited in vain for the end."""

    def __init__(self) -> None:
        super().__init__()
        self.has_ended = threading.Event()

    def output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        self.has_ended.wait(0.3)
        super().output(name, stream, text)

    def exited(self, name: ProcessName, status: int) -> None:
        self.has_ended.set()
        super().exited(name, status)


ANOTHER = """
inlet, outlet = os.pipe()
if not os.fork():
    os.setsid()
    say("held", pid=os.getpid())
    os.close(outlet)
    while True:
        {does}
os.close(outlet)
os.read(inlet, 1)
"""


@pytest.mark.parametrize(
    "before",
    [
        "",
        ANOTHER.format(does="time.sleep(60)"),
        ANOTHER.format(does="os.write(2, b'more\\n' * 99)"),
        ANOTHER.format(does="os.write(2, b'more\\n'); time.sleep(0.05)"),
    ],
    ids=["alone", "held by another", "written to by another", "slowly written to by another"],
)
def test_all_output_comes_before_the_end(before: str) -> None:
    """However slow the reader is. A process that has left the session may keep the pipe open."""
    listener = SlowListener()
    script = f"{before}\nos.write(2, b'last words\\n'); os._exit(0)"
    spec = ProcessSpec(name=NAME, argv=child(script), first_line=b"{}")
    process = start_child(spec, listener)
    heard = listener.until("exited")
    for kind, event in heard:
        if kind == "held" and isinstance(event, dict):
            os.kill(event["pid"], signal.SIGKILL)
    assert "last words" in [text for kind, text in heard if kind == "log"]
    process.close()


def test_its_own_session() -> None:
    with started("say('ready', own=os.getsid(0) == os.getpid()); forever()") as (_, listener):
        assert listener.until("ready")[-1][1] == {"event": "ready", "own": True}


def test_cannot_be_started() -> None:
    spec = ProcessSpec(name=NAME, argv=("/no/such/python",), first_line=b"")
    with pytest.raises(JobError, match=r"cannot start worker 0 \(client 0"):
        start_child(spec, RecordingListener())


def test_a_child_that_no_thread_can_follow_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[int] = []
    spawn = child_module._spawn

    def recorded(*arguments: Any) -> Any:
        child, events = spawn(*arguments)
        spawned.append(child.pid)
        return child, events

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(child_module, "_spawn", recorded)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    spec = ProcessSpec(name=NAME, argv=child("forever()"), first_line=b"{}")
    with pytest.raises(JobError, match=r"^cannot start worker 0 .*: no more threads or processes"):
        start_child(spec, RecordingListener())
    assert len(spawned) == 1
    assert none_left(spawned)


def test_a_child_finds_what_its_settings_say(tmp_path: Path) -> None:
    listener = RecordingListener()
    settings = ChildSettings(environment={"ONE": "of the settings"}, folder=str(tmp_path))
    spec = ProcessSpec(
        name=NAME,
        argv=child(
            "say('found', folder=os.getcwd(), **{k: os.environ[k] for k in ('ONE', 'TWO')})"
        ),
        environment={"TWO": "its own"},
        first_line=b"{}",
    )
    process = start_child(spec, listener, settings)
    try:
        assert listener.until("found")[-1][1] == {
            "event": "found",
            "folder": str(tmp_path),
            "ONE": "of the settings",
            "TWO": "its own",
        }
    finally:
        process.close()


def test_children_find_the_modules_that_this_process_finds() -> None:
    environment = base_environment({"PYTHONPATH": "/mine", "LANG": "C", "PYTHONINSPECT": "1"})
    assert "PYTHONINSPECT" not in environment
    assert environment["LANG"] == "C"
    folders = environment["PYTHONPATH"].split(os.pathsep)
    assert "/mine" in folders and str(Path(poseidon.__file__).parents[1]) in folders


@pytest.mark.parametrize("every", [True, False])
def test_a_child_may_start_ignoring_the_signals_of_a_scheduler(every: bool) -> None:
    listener = RecordingListener()
    argv = child("say('ready'); forever()")
    spec = ProcessSpec(name=NAME, argv=argv, first_line=b"{}", ignore_signals=not every)
    process = start_child(spec, listener, ChildSettings(ignore_signals=every))
    try:
        listener.until("ready")
        ignored = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        (mask,) = [int(line.split()[1], 16) for line in status if line.startswith("SigIgn:")]
        assert all(mask >> (number - 1) & 1 for number in ignored)
        process.terminate()  # nothing else ends it
        assert listener.until("exited")[-1] == ("exited", -9)
    finally:
        process.close()


def test_secrets_are_not_shown() -> None:
    spec = ProcessSpec(name=NAME, argv=("python",), first_line=b'{"token": "s3cret"}')
    assert "s3cret" not in repr(spec)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exited with status 0"),
        (-9, "was killed by signal 9 (SIGKILL)"),
        (-250, "was killed by signal 250"),
    ],
)
def test_exit_words(status: int, words: str) -> None:
    assert describe_exit(status) == words


class FailingListener(RecordingListener):
    """Cannot take a line of text."""

    def output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        raise RuntimeError("no room for a line")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_listener_that_fails_ends_the_process_with_an_error(stream: str) -> None:
    listener = FailingListener()
    script = f"print('text', file=sys.{stream}, flush=True)\nforever()\n"
    process = start_child(ProcessSpec(name=NAME, argv=child(script), first_line=b"{}"), listener)
    *_, (kind, event), (_, status) = listener.until("exited", 10.0)
    assert (
        kind == "error"
        and isinstance(event, dict)
        and "no room for a line" in str(event["message"])
    )
    assert status == -9
    process.close()


def test_a_child_that_cannot_be_waited_for_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def waitid(*_: object) -> None:
        raise ChildProcessError("No child processes")

    monkeypatch.setattr("os.waitid", waitid)
    listener = RecordingListener()
    spec = ProcessSpec(name=NAME, argv=child("forever()"), first_line=b"{}")
    process = start_child(spec, listener)
    *_, (kind, event), _ = listener.until("exited", 10.0)
    assert (
        kind == "error"
        and isinstance(event, dict)
        and "No child processes" in str(event["message"])
    )
    assert process.poll() is not None
    process.close()
    assert none_left([process.pid])
