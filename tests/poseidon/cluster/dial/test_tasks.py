"""Rendezvous over real sockets: the tasks are threads, their processes children."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
import zmq

from poseidon import __version__
from poseidon.cluster.agent import connection
from poseidon.cluster.agent.host import Agent
from poseidon.cluster.agent.messages import REPORTS, REQUESTS, Exited, Heartbeat, Join, KilledByUser
from poseidon.cluster.agent.remote import AgentTimeouts, RemoteAgent
from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.dial import tasks
from poseidon.cluster.dial.channel import QueueChannel
from poseidon.cluster.dial.tasks import Rendezvous, TaskDialer, run_task
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.jobs.kill import USER_KILL
from poseidon.cluster.process import ProcessSpec
from poseidon.cluster.rendezvous import TaskHost, server_keys, task_keys
from poseidon.errors import JobError
from ps_server.transport.zmq_sockets import ZmqClientTransport, ZmqServerTransport
from tests.support.polling import until
from tests.support.recording_listener import RecordingListener

KEY, OTHER_KEY = b"k" * 64, b"o" * 64
LIMIT_S = 60.0
NAME = ProcessName(role=Role.WORKER, index=0, client=0, host="a")
ECHO = "import sys\nfor line in sys.stdin: print('said', line.strip(), flush=True)"
SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
HANDLE_SIGNALS = tasks._signals_to

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _tasks_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python handles signals on the main thread alone."""

    def signals_to(agent: Agent) -> AbstractContextManager[list[int]]:
        main = threading.current_thread() is threading.main_thread()
        return HANDLE_SIGNALS(agent) if main else nullcontext([])

    monkeypatch.setattr(tasks, "_signals_to", signals_to)


def join_of(rank: int, size: int, local_rank: int = 0, version: str = __version__) -> Join:
    return Join(
        version=version,
        rank=rank,
        size=size,
        local_rank=local_rank,
        address=f"10.0.0.{rank}",
        host=f"node{rank - local_rank}",
    )


@dataclass
class Guest:
    """A task in a thread."""

    address: str
    join: Join
    key: bytes = KEY
    timeout_s: float = LIMIT_S
    status: int | None = None
    error: str = ""
    gone: threading.Event = field(default_factory=threading.Event)

    def start(self) -> threading.Thread:
        name = f"guest {self.join.rank}"
        thread = threading.Thread(target=self.run, name=name, daemon=True)
        thread.start()
        return thread

    def run(self) -> None:
        try:
            self.status = run_task(self.address, task_keys(self.key), self.join, self.timeout_s)
        except JobError as error:
            self.error = str(error)
        finally:
            self.gone.set()


@contextmanager
def rendezvous(size: int, **more: Any) -> Iterator[Rendezvous]:
    with Rendezvous("127.0.0.1", 0, server_keys(KEY), size=size, **more) as found:
        yield found


@contextmanager
def guests_of(found: Rendezvous, *joins: Join) -> Iterator[list[Guest]]:
    """Tasks besides rank 0; all have ended at the end."""
    guests = [Guest(found.address, join) for join in joins]
    threads = [guest.start() for guest in guests]
    try:
        yield guests
    finally:
        found.dismiss(1)
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()


@contextmanager
def gathered(size: int, **more: Any) -> Iterator[tuple[Rendezvous, list[Guest], list[RemoteAgent]]]:
    """A rendezvous of tasks on hosts of their own; guest k is rank k + 1."""
    with rendezvous(size, **more) as found:
        joins = [join_of(rank, size) for rank in range(1, size)]
        with guests_of(found, *joins) as guests:
            pairs = found.gather(join_of(0, size), LIMIT_S)
            yield found, guests, [agent for _, agent in pairs]


def start(
    agent: RemoteAgent, *argv: str, first_line: bytes = b""
) -> tuple[RemoteProcess, RecordingListener]:
    listener = RecordingListener()
    spec = ProcessSpec(name=NAME, argv=argv, first_line=first_line)
    return agent.start(spec, listener), listener


def start_python(
    agent: RemoteAgent, script: str, first_line: bytes = b""
) -> tuple[RemoteProcess, RecordingListener]:
    return start(agent, sys.executable, "-c", script, first_line=first_line)


def start_sleeper(agent: RemoteAgent) -> tuple[int, RecordingListener]:
    """Start a process that runs until it is ended; return its id."""
    _, listener = start_python(agent, SLEEP)
    return int(str(listener.until("log")[-1][1])), listener


def test_processes_run_on_all_hosts() -> None:
    with gathered(3) as (found, guests, agents):
        assert [agent.label for agent in agents] == [f"rank {k} (node{k})" for k in range(3)]
        started = [start_python(agent, ECHO, b"line %d" % k) for k, agent in enumerate(agents)]
        for number, (process, listener) in enumerate(started):
            assert listener.until("log")[-1] == ("log", f"said line {number}")
            process.send_line(b"more")
            assert listener.until("log")[-1] == ("log", "said more")
            process.terminate()
            process.kill()
            assert listener.until("exited")[-1] == ("exited", -9)
        found.dismiss(7)
    assert [(guest.status, guest.error) for guest in guests] == [(7, "")] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_to_its_end(rank: int) -> None:
    line = 10 * "0123456789"  # more than a pipe holds
    script = f"import sys; sys.stdout.write('{line}\\n' * 1_000); sys.exit(3)"
    with gathered(2) as (_, _, agents):
        _, listener = start_python(agents[rank], script)
        received = listener.until("exited")
        assert received[-1] == ("exited", 3)
        assert received[:-1] == [("log", line)] * 1_000
        (_, why), end = start(agents[rank], "/no/such/program")[1].until("exited")
        assert "/no/such/program" in str(why) and end == ("exited", 127)


@pytest.mark.parametrize("rank", [0, 1])
def test_signals_that_ask_to_end_are_the_tasks_business(rank: int) -> None:
    """A scheduler sends them to all processes of a task."""
    script = "for s in TERM INT HUP USR1 USR2; do kill -$s $$; done; echo on; exit 4"
    with gathered(2) as (_, _, agents):
        _, listener = start(agents[rank], "sh", "-c", script)
        assert listener.until("exited") == [("log", "on"), ("exited", 4)]


def test_those_who_only_wait_leave_with_the_others() -> None:
    with rendezvous(4) as found:
        joins = [join_of(rank, 4, local_rank=rank % 2) for rank in range(1, 4)]
        with guests_of(found, *joins) as guests:
            gathered_hosts = found.gather(join_of(0, 4), LIMIT_S)
            assert [host.first.rank for host, _ in gathered_hosts] == [0, 2]
            assert TaskDialer(gathered_hosts).tasks == (2, 2)
            found.dismiss(0)
    assert [guest.status for guest in guests] == [0, 0, 0]


def test_a_task_that_joins_after_the_job_is_dismissed_too() -> None:
    with rendezvous(2) as found:
        found.dismiss(5)
        late = Guest(found.address, join_of(1, 2))
        late.run()
        assert (late.status, late.error) == (5, "")


def test_a_job_ends_as_soon_as_its_tasks_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    # The time limit of a test ends a wait that is this long.
    monkeypatch.setattr(tasks, "TIMEOUTS", AgentTimeouts(grace_s=2 * LIMIT_S))
    with gathered(2) as (found, guests, _):
        found.dismiss(0)
        assert guests[0].gone.wait(LIMIT_S)


@pytest.mark.parametrize("size", [1, 2])
def test_the_thread_that_waits_for_messages_closes_the_port(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ's sockets and pollers fail when two threads use them, as under a flood."""
    closing: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(
        ZmqServerTransport,
        "admit_no_more",
        lambda _: closing.put(threading.current_thread().name),
    )
    with gathered(size):
        assert closing.get(timeout=LIMIT_S) == "poseidon rendezvous"


def test_an_error_sends_everybody_away_and_ends_their_processes() -> None:
    pids = []
    with pytest.raises(ZeroDivisionError), gathered(2) as (_, guests, agents):
        pids += [start_sleeper(agent)[0] for agent in agents]
        raise ZeroDivisionError
    assert not any(map(psutil.pid_exists, pids))
    assert [(guest.status, guest.error) for guest in guests] == [(1, "")]


def test_an_error_before_all_have_joined_is_told_to_those_who_have() -> None:
    with pytest.raises(ZeroDivisionError), rendezvous(3) as found:
        guest = Guest(found.address, join_of(1, 3))
        thread = guest.start()
        until(lambda: len(found._members) == 1, "rank 1 did not join", LIMIT_S)
        raise ZeroDivisionError
    thread.join(LIMIT_S)
    assert (guest.status, guest.error) == (None, "the job failed before it had started")


def test_a_task_without_the_key_is_not_heard() -> None:
    with rendezvous(3) as found, guests_of(found, join_of(1, 3)) as (friend,):
        stranger = Guest(found.address, join_of(2, 3), key=OTHER_KEY, timeout_s=1.0)
        stranger.run()
        assert stranger.error.startswith(f"rank 0 at {found.address} did not answer within 1 s: ")
        assert "have all the same key file?" in stranger.error
        until(lambda: len(found._members) == 1, "rank 1 did not join", LIMIT_S)
        with pytest.raises(JobError, match=r"^of 3 tasks .* rank 2; \d+ attempts with a different"):
            found.gather(join_of(0, 3), 0.1)
    assert friend.status == 1


def test_nobody_is_heard_in_clear() -> None:
    with rendezvous(2) as found, zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(found.address)
        stranger.send(REPORTS.encode(join_of(1, 2)))
        assert not stranger.poll(200), "not a byte comes back"
        with guests_of(found, join_of(1, 2)) as guests:
            hosts = [host.first.host for host, _ in found.gather(join_of(0, 2), LIMIT_S)]
            assert hosts == ["node0", "node1"]
            found.dismiss(0)
    assert not guests[0].error


@pytest.mark.parametrize("junk", [b"", b'{"kind": "Join"}'])
def test_a_task_of_another_protocol_is_reported_as_missing(junk: bytes) -> None:
    with rendezvous(2) as found:
        other = ZmqClientTransport([found.address], task_keys(KEY))
        try:
            until(lambda: other.send(0, [junk]), "not sent", LIMIT_S)
            with pytest.raises(JobError, match=r"within 0.3 s: rank 1$"):
                found.gather(join_of(0, 2), 0.3)
        finally:
            other.close()


def test_what_listens_there_is_not_rank_0() -> None:
    server = ZmqServerTransport("tcp://127.0.0.1:0", server_keys(KEY))
    address = server.address
    guest = Guest(address, join_of(1, 2))
    thread = guest.start()
    try:
        while not guest.gone.is_set():
            for name, _ in server.receive(0.1):
                server.send(name, [b"{}"])
    finally:
        thread.join(LIMIT_S)
        server.close()
    assert guest.error.startswith(f"rank 0 at {address} sent something that is not of this proto")


@pytest.mark.parametrize(
    ("join", "message"),
    [
        (join_of(1, 2, version="0.0"), "rank 1 on node1 has Poseidon 0.0, rank 0 has"),
        (join_of(1, 3), "rank 1 on node1 expects 3 tasks, rank 0 2"),
        (join_of(2, 2), "rank 2 on node2 is not one of 2 tasks"),
    ],
)
def test_a_task_that_does_not_belong_here(join: Join, message: str) -> None:
    with rendezvous(2) as found:
        guest = Guest(found.address, join)
        thread = guest.start()
        with pytest.raises(JobError, match=message):
            found.gather(join_of(0, 2), LIMIT_S)
        thread.join(LIMIT_S)
    assert message in guest.error


def test_two_tasks_of_one_rank() -> None:
    with rendezvous(3) as found, guests_of(found, join_of(1, 3), join_of(1, 3)) as guests:
        message = "rank 1 on node1 has joined already, on node1; expected each rank once"
        with pytest.raises(JobError, match=message):
            found.gather(join_of(0, 3), LIMIT_S)
    assert sorted(guest.error for guest in guests) == ["", message]


@pytest.fixture
def _soon_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 takes a task for lost after a second, a task rank 0 after three."""
    monkeypatch.setattr(connection, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(tasks, "TIMEOUTS", AgentTimeouts(silence_s=1.0, launcher_silence_s=3.0))


@pytest.mark.usefixtures("_soon_silent")
def test_a_host_that_falls_silent_is_lost_and_dismissed(monkeypatch: pytest.MonkeyPatch) -> None:
    with gathered(2) as (found, guests, agents):
        pid, listener = start_sleeper(agents[1])
        monkeypatch.setattr(tasks._RankZeroChannel, "send", lambda self, message: None)
        *_, (_, event), (_, status) = listener.until("exited")
        assert isinstance(event, dict)
        assert event["host_lost"] and not event["unwanted"]
        lost = "rank 1 (node1): it has sent nothing for 1 s"
        assert (event["message"], status) == (f"{lost}; the job was stopped", 1)
        with pytest.raises(JobError) as caught:
            start(agents[1], "true")
        assert str(caught.value) == lost
        assert agents[0].lost is None
        found.dismiss(6)  # it was only slow
    assert guests[0].status == 6
    assert not psutil.pid_exists(pid)


def test_tasks_may_join_long_after_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers start tasks as places become free: those that wait are not lost, and send nothing
    that nobody reads yet.
    """
    monkeypatch.setattr(connection, "HEARTBEAT_S", 0.001)
    taken: list[bytes] = []
    with rendezvous(3) as found:
        take = found._take

        def count(name: bytes, frames: Any) -> None:
            take(name, frames)
            taken.append(name)

        monkeypatch.setattr(found, "_take", count)
        with guests_of(found, join_of(1, 3)):
            until(lambda: len(taken) == 1, "the first task has not joined", 20.0)
            with guests_of(found, join_of(2, 3)):
                until(lambda: len(taken) == 2, "the second task has not joined", 20.0)
                monkeypatch.setattr(connection, "HEARTBEAT_S", 2.0)
                agents = [agent for _, agent in found.gather(join_of(0, 3), 20.0)]
                for agent in agents:
                    assert start(agent, "true")[1].until("exited")[-1] == ("exited", 0)
                found.dismiss(0)


@pytest.mark.usefixtures("_soon_silent")
def test_rank_0_that_falls_silent_is_lost_to_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    with gathered(2) as (found, guests, agents):
        pid, _ = start_sleeper(agents[1])
        monkeypatch.setattr(found, "_send_waiting", lambda *_: None)
        assert guests[0].gone.wait(LIMIT_S)
        assert not psutil.pid_exists(pid)
        assert guests[0].error == f"rank 0 at {found.address} has sent nothing for 3 s"
        until(lambda: agents[1].lost is not None, "its agent counts as there", LIMIT_S)


@contextmanager
def rank_0_in_a_thread(on_signal: Any, on_gathered: Any) -> Iterator[str]:
    """Run rank 0 of two in a thread, so that the task is on the main thread."""
    with rendezvous(2, on_signal=on_signal) as found:

        def serve() -> None:
            on_gathered(found, [agent for _, agent in found.gather(join_of(0, 2), LIMIT_S)])

        thread = threading.Thread(target=serve, name="rank 0")
        thread.start()
        try:
            yield found.address
        finally:
            thread.join(LIMIT_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_task_that_is_asked_to_end_tells_rank_0(number: signal.Signals) -> None:
    """Its host may leave the job, if no other task runs there."""
    asked: list[bool] = []
    heard = threading.Event()

    def on_signal(leave: Callable[[], bool]) -> None:
        asked.append(leave())
        heard.set()

    def serve(found: Rendezvous, agents: list[RemoteAgent]) -> None:
        _, listener = start_sleeper(agents[1])
        agents[1].leave = lambda: True
        os.kill(os.getpid(), number)
        assert heard.wait(LIMIT_S)
        assert listener.received.empty(), "its processes run on: rank 0 decides"
        found.dismiss(3)

    before = signal.getsignal(number)
    with rank_0_in_a_thread(on_signal, serve) as address:
        assert run_task(address, task_keys(KEY), join_of(1, 2), LIMIT_S) == 3
    assert asked == [True]
    assert signal.getsignal(number) is before


def test_a_task_that_is_asked_to_end_before_all_have_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rendezvous(3) as found:
        joined = threading.Event()
        take = found._join

        def note(name: bytes, join: Join) -> None:
            take(name, join)
            os.kill(os.getpid(), signal.SIGTERM)
            joined.set()

        monkeypatch.setattr(found, "_join", note)
        with pytest.raises(JobError, match=r"^the task was ended by SIGTERM") as caught:
            run_task(found.address, task_keys(KEY), join_of(1, 3), LIMIT_S)
        assert joined.is_set()
    assert caught.value.exit_code == 128 + signal.SIGTERM


def test_a_task_whose_job_the_user_kills() -> None:
    events: list[Any] = []

    def serve(found: Rendezvous, agents: list[RemoteAgent]) -> None:
        _, listener = start_sleeper(agents[1])
        os.kill(os.getpid(), USER_KILL)
        events.extend(event for _, event in listener.until("exited"))

    with (
        rank_0_in_a_thread(lambda name: None, serve) as address,
        pytest.raises(JobError, match=r"^the job was killed on this host$"),
    ):
        run_task(address, task_keys(KEY), join_of(1, 2), LIMIT_S)
    assert events[0]["message"].startswith("rank 1 (node1): the job was killed there")
    assert events[0]["unwanted"]


class _BusyTransport:
    """Brings a message of rank 0 as soon as the channel of the task is closed."""

    def __init__(self, *_: object) -> None:
        self.far: QueueChannel | None = None
        self.sent: list[Any] = []

    def receive(self, timeout_s: float) -> list[tuple[int, list[bytes]]]:
        until(
            lambda: self.far is not None and self.far.closed, "the channel is not closed", LIMIT_S
        )
        return [(0, [REQUESTS.encode(Heartbeat())])]

    def send(self, peer: int, frames: list[bytes]) -> bool:
        self.sent += [type(REPORTS.decode(frame)) for frame in frames]
        return True

    def wake(self) -> None: ...

    def close(self) -> None: ...


def test_the_last_reports_of_a_task_are_sent_though_rank_0_sends_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "ZmqClientTransport", _BusyTransport)
    channel = tasks._RankZeroChannel("tcp://10.0.0.1:1", task_keys(KEY), join_of(1, 2))
    transport: Any = channel._transport
    transport.far = channel._far
    channel.send(REPORTS.encode(KilledByUser()))
    channel.close()
    assert transport.sent == [Join, KilledByUser, Exited]


def test_a_port_that_is_taken() -> None:
    with rendezvous(1) as found, pytest.raises(JobError, match=r"in use.*--rendezvous_port"):
        port = int(found.address.rpartition(":")[2])
        Rendezvous("127.0.0.1", port, server_keys(KEY), size=1)


def test_nothing_secret_is_seen() -> None:
    with gathered(2) as (found, _, agents):
        seen = f"{found.__dict__} {found._members} {agents[1].__dict__}"
        assert KEY.decode() not in seen


def test_an_exception_of_the_servers_thread_ends_every_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tasks, "TIMEOUTS", AgentTimeouts(launcher_silence_s=3.0))

    def fail(name: bytes, frames: object) -> None:
        raise RuntimeError("nothing can be done")

    with gathered(2) as (found, guests, agents):
        pid, listener = start_sleeper(agents[1])
        monkeypatch.setattr(found, "_take", fail)
        assert listener.until("exited")[-1] == ("exited", 1)
        why = "the rendezvous has failed: RuntimeError: nothing can be done"
        with pytest.raises(JobError, match=f"^{why}$"):
            found.gather(join_of(0, 2), LIMIT_S)
        assert guests[0].gone.wait(LIMIT_S)
        assert not psutil.pid_exists(pid)
    assert why in capsys.readouterr().err


def test_an_exception_of_the_handler_of_a_signal_loses_one_host() -> None:
    def fail(leave: object) -> None:
        raise RuntimeError("nothing can be done")

    messages: list[str] = []

    def serve(found: Rendezvous, agents: list[RemoteAgent]) -> None:
        _, listener = start_sleeper(agents[1])
        os.kill(os.getpid(), signal.SIGTERM)
        messages.extend(str(event) for _, event in listener.until("exited"))
        found.dismiss(1)

    with rank_0_in_a_thread(fail, serve) as address:
        assert run_task(address, task_keys(KEY), join_of(1, 2), LIMIT_S) == 1
    assert "nothing can be done" in messages[0]


class FakeAgent:
    """An agent that is lost, or not."""

    def __init__(self, label: str, lost: str | None = None) -> None:
        self.label, self.lost = label, lost


def dialer_of(*agents: FakeAgent) -> TaskDialer:
    size = 2 * len(agents)
    firsts = [
        Join(version="1", rank=2 * k, size=size, local_rank=0, address=f"10.0.0.{k}", host="a")
        for k in range(len(agents))
    ]
    hosts = [TaskHost(first=first, tasks=2) for first in firsts]
    pairs: Any = list(zip(hosts, agents, strict=True))
    return TaskDialer(pairs)


def test_a_host_of_the_job_for_each_host_of_the_tasks() -> None:
    dialer = dialer_of(FakeAgent("a"), FakeAgent("b"))
    assert [(host.id, host.address, host.port) for host in dialer.hosts] == [
        (0, "10.0.0.0", 0),
        (1, "10.0.0.1", 0),
    ]
    assert dialer.tasks == (2, 2)
    assert dialer.resume_command("poseidon train", {"snapshot": "a"}) == (
        "the same tasks with --snapshot=a"
    )


def test_a_lost_task_cannot_be_dialled_again() -> None:
    there, lost = FakeAgent("rank 0 (node0)"), FakeAgent("rank 2 (node1)", "it has ended")
    dialer = dialer_of(there, lost)
    found = dialer.dial(dialer.hosts, "j")
    assert found[0] is there
    assert str(found[1]) == "rank 2 (node1): it has ended"
    assert dialer.given
