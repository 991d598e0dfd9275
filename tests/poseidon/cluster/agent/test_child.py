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
from tests.support.recording_listener import WAIT_S, FailingListener, RecordingListener

NAME = ProcessName(role=Role.WORKER, index=0, client=0, host="127.0.0.1")

pytestmark = pytest.mark.processes


@contextmanager
def started(
    script: str,
    settings: ChildSettings | None = None,
    *,
    first_line: bytes = b"{}",
    listener: RecordingListener | None = None,
    **spec: Any,
) -> Iterator[tuple[ChildProcess, RecordingListener]]:
    listener = listener or RecordingListener()
    whole = ProcessSpec(name=NAME, argv=child(script), first_line=first_line, **spec)
    process = start_child(whole, listener, *([settings] if settings else []))
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
    with started(script, own_stdout=own_stdout) as (process, listener):
        for expected in PIECES[own_stdout]:
            assert listener.pieces.get(timeout=WAIT_S) == expected
            process.send_line(b"")
        assert ("ready", {"event": "ready"}) in listener.until("exited")


@pytest.mark.parametrize("own_stdin", [True, False])
def test_one_child_may_read_the_launchers_standard_input(own_stdin: bool) -> None:
    script = """
fd = os.environ.get("POSEIDON_STDIN_FD")
say("heard", text=os.read(int(fd), 9).decode() if fd else None)
"""
    theirs, ours = os.pipe()
    with started(script, ChildSettings(stdin=theirs), own_stdin=own_stdin) as (_, listener):
        os.write(ours, b"c\n")
        expected = "c\n" if own_stdin else None
        assert listener.until("heard")[-1] == ("heard", {"event": "heard", "text": expected})
    os.close(ours)
    os.close(theirs)


def test_commands_and_environment_arrive() -> None:
    script = (
        "say('env', value=os.environ['POSEIDON_TEST'])\nfor c in commands(): say('got', do=c['do'])"
    )
    with started(script, environment={"POSEIDON_TEST": "x"}) as (process, listener):
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


HANDLES = "signal.signal(signal.SIGTERM, lambda *_: (say('saved'), os._exit(4)))\n"
IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


@pytest.mark.parametrize(
    ("ignored", "script", "status"),
    [
        (False, "say('ready')\nos.kill(os.getpid(), signal.SIGSTOP)\nforever()", -15),
        (False, f"{HANDLES}say('ready')\nforever()", 4),
        (False, f"{IGNORES}say('ready')\nfor c in commands(): os._exit(0)", 0),
        (True, "say('ready')\nforever()", -9),
        (True, f"{HANDLES}say('ready')\nforever()", 4),
    ],
)
def test_terminate_leaves_a_child_its_time_that_handles_or_ignores_it(
    ignored: bool, script: str, status: int
) -> None:
    """`poseidon worker` starts agents, and so their children, ignoring SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignored else before)
    try:
        with started(script) as (process, listener):
            listener.until("ready")
            process.terminate()
            process.send_line(b'{"do": "stop"}')
            heard = listener.until("exited")
            assert heard[-1] == ("exited", status)
            assert ("saved" in dict(heard)) is (status == 4)
    finally:
        signal.signal(signal.SIGTERM, before)


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
    script = f"{before}\nos.write(2, b'last words\\n'); os._exit(0)"
    with started(script, listener=SlowListener()) as (_, listener):
        heard = listener.until("exited")
        for kind, event in heard:
            if kind == "held" and isinstance(event, dict):
                os.kill(event["pid"], signal.SIGKILL)
        assert "last words" in [text for kind, text in heard if kind == "log"]


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
    settings = ChildSettings(environment={"ONE": "of the settings"}, folder=str(tmp_path))
    script = "say('found', size=len(document), folder=os.getcwd(), one=os.environ['ONE'])"
    large = b'"' + b"x" * (1 << 22) + b'"'
    with started(script, settings, first_line=large) as (_, listener):
        found = {"size": 1 << 22, "folder": str(tmp_path), "one": "of the settings"}
        assert listener.until("found")[-1][1] == {"event": "found", **found}


def test_children_find_the_modules_that_this_process_finds() -> None:
    environment = base_environment({"PYTHONPATH": "/mine", "LANG": "C", "PYTHONINSPECT": "1"})
    assert "PYTHONINSPECT" not in environment
    assert environment["LANG"] == "C"
    folders = environment["PYTHONPATH"].split(os.pathsep)
    assert "/mine" in folders and str(Path(poseidon.__file__).parents[1]) in folders


@pytest.mark.parametrize("every", [True, False])
def test_a_child_may_start_ignoring_the_signals_of_a_scheduler(every: bool) -> None:
    settings, script = ChildSettings(ignore_signals=every), "say('ready'); forever()"
    with started(script, settings, ignore_signals=not every) as (process, listener):
        listener.until("ready")
        ignored = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        (mask,) = [int(line.split()[1], 16) for line in status if line.startswith("SigIgn:")]
        assert all(mask >> (number - 1) & 1 for number in ignored)
        process.terminate()  # nothing else ends it
        assert listener.until("exited")[-1] == ("exited", -9)


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


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_listener_that_fails_ends_the_process_with_an_error(stream: str) -> None:
    script = f"print('text', file=sys.{stream}, flush=True)\nforever()\n"
    with started(script, listener=FailingListener()) as (_, listener):
        *_, error, exited = listener.until("exited", 10.0)
        assert "no room for a line" in str(error)
        assert (error[0], exited) == ("error", ("exited", -9))


def test_a_child_that_cannot_be_waited_for_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def waitid(*_: object) -> None:
        raise ChildProcessError("No child processes")

    monkeypatch.setattr("os.waitid", waitid)
    with started("forever()") as (process, listener):
        *_, error, _ = listener.until("exited", 10.0)
        assert error[0] == "error"
        assert "No child processes" in str(error)
        assert process.poll() is not None
