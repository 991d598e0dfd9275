"""Rendezvous over real sockets: the tasks are threads, their programs children."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import zmq

from poseidon import __version__
from poseidon.cluster.rendezvous.key import server_keys, task_keys
from poseidon.cluster.rendezvous.server import RendezvousServer
from poseidon.cluster.rendezvous.task import TaskSettings, run_task
from poseidon.cluster.rendezvous.task_connection import TaskConnection
from poseidon.cluster.rendezvous.wire import TaskInfo, encode
from poseidon.errors import JobError
from tests.support.polling import until

KEY, OTHER_KEY = b"k" * 64, b"o" * 64
LIMIT_S = 60.0
SLEEP = "import os, time; print(os.getpid()); time.sleep(600)"
ECHO = "import sys\nfor line in sys.stdin: print('said', line.strip(), flush=True)\nsys.exit(3)"

pytestmark = pytest.mark.processes


@dataclass
class Guest:
    """A task in a thread."""

    address: str
    rank: int
    size: int
    local_rank: int = 0
    key: bytes = KEY
    version: str = __version__
    join_timeout_s: float = LIMIT_S
    status: int | None = None
    error: str = ""
    asked: list[str] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self.run, name=f"guest {self.rank}", daemon=True)
        thread.start()
        return thread

    def run(self) -> None:
        arrival = TaskInfo(
            version=self.version,
            rank=self.rank,
            size=self.size,
            local_rank=self.local_rank,
            address="127.0.0.1",
            host=f"node{self.rank}",
        )
        settings = TaskSettings(
            join_timeout_s=self.join_timeout_s,
            runs_programs=self.local_rank == 0,
            grace_s=0.2,
            environment={},
        )
        try:
            self.status = run_task(
                self.address,
                task_keys(self.key),
                arrival,
                settings,
                pending_signal=lambda: self.asked.pop() if self.asked else None,
            )
        except JobError as error:
            self.error = str(error)
        finally:
            self.gone.set()


@contextmanager
def rendezvous(size: int, **more: object) -> Iterator[RendezvousServer]:
    with RendezvousServer("127.0.0.1", 0, server_keys(KEY), size=size, **more) as found:  # type: ignore[arg-type]
        yield found


@contextmanager
def gathered(count: int) -> Iterator[tuple[RendezvousServer, list[Guest], list[TaskConnection]]]:
    """A rendezvous of tasks on hosts of their own."""
    with rendezvous(count) as found:
        guests = [Guest(found.address, rank, count) for rank in range(count)]
        threads = [guest.start() for guest in guests]
        try:
            yield found, guests, [host for _, host in found.gather(LIMIT_S)]
        except BaseException as error:
            found.__exit__(type(error), error, None)
            raise
        finally:
            found.dismiss(1)
            for thread in threads:
                thread.join(LIMIT_S)
                assert not thread.is_alive()


def test_a_task_that_joins_after_the_job_is_dismissed_too() -> None:
    with rendezvous(2) as found:
        found.dismiss(5)
        late = Guest(found.address, 1, 2)
        late.run()
        assert (late.status, late.error) == (5, "")


def test_programs_run_on_all_hosts() -> None:
    with gathered(3) as (found, guests, hosts):
        assert [host.label for host in hosts] == [
            "rank 0 (node0)",
            "rank 1 (node1)",
            "rank 2 (node2)",
        ]
        talks = [host.open([sys.executable, "-u", "-c", ECHO]) for host in hosts]
        for number, talk in enumerate(talks):
            talk.send(b"line %d" % number)
        assert [talk.receive() for talk in talks] == [
            b"said line 0",
            b"said line 1",
            b"said line 2",
        ]
        for talk in talks:
            talk.close()
            assert (talk.receive(), talk.receive_error(), talk.status(LIMIT_S)) == (None, None, 3)
        found.dismiss(7)
    assert [(guest.status, guest.error) for guest in guests] == [(7, "")] * 3


def test_a_program_to_its_end() -> None:
    with gathered(1) as (found, _, (host,)):
        script = "import sys; d = sys.stdin.buffer.read(); sys.stdout.buffer.write(d[::-1]); sys.stderr.write('w')"
        data = bytes(range(256)) * 5000
        done = host.run([sys.executable, "-c", script], stdin=data, timeout_s=LIMIT_S)
        assert (done.status, done.stdout, done.stderr) == (0, data[::-1], b"w")
        done = host.run(["/no/such/program"], timeout_s=LIMIT_S)
        assert done.status == 127 and b"/no/such/program" in done.stderr
        with pytest.raises(JobError, match=r"rank 0 \(node0\): 'sleep' did not end within 0.1 s"):
            host.run(["sleep", "60"], timeout_s=0.1)
        found.dismiss(0)


def test_those_who_only_wait_leave_with_the_others() -> None:
    with rendezvous(4) as found:
        places = [(0, 0), (1, 1), (2, 0), (3, 1)]
        guests = [Guest(found.address, rank, 4, local_rank=local) for rank, local in places]
        threads = [guest.start() for guest in guests]
        hosts = found.gather(LIMIT_S)
        assert [(plan.rank, plan.tasks) for plan, _ in hosts] == [(0, 2), (2, 2)]
        found.dismiss(0)
    for thread in threads:
        thread.join(LIMIT_S)
    assert [guest.status for guest in guests] == [0, 0, 0, 0]


def test_an_error_sends_everybody_away_and_ends_their_programs() -> None:
    with pytest.raises(ZeroDivisionError), gathered(2) as (_, guests, hosts):
        talk = hosts[1].open([sys.executable, "-u", "-c", SLEEP])
        pid = int(talk.receive() or b"")
        raise ZeroDivisionError
    assert not psutil.pid_exists(pid)
    assert all(guest.status is None and "the job failed" in guest.error for guest in guests)


def test_a_task_without_the_key_is_not_heard() -> None:
    with rendezvous(2) as found:
        stranger = Guest(found.address, 1, 2, key=OTHER_KEY, join_timeout_s=1.0)
        mine = Guest(found.address, 0, 2)
        threads = [mine.start(), stranger.start()]
        threads[1].join(LIMIT_S)
        assert "have all the same key file?" in stranger.error
        with pytest.raises(JobError, match=r"of 2 tasks these did not join at tcp://127.* rank 1"):
            found.gather(0.1)
    threads[0].join(LIMIT_S)
    assert mine.status == 1


def test_nobody_is_heard_in_clear() -> None:
    with rendezvous(1) as found, zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(found.address)
        arrival = TaskInfo(
            version=__version__, rank=0, size=1, local_rank=0, address="127.0.0.1", host="stranger"
        )
        stranger.send_multipart(encode(arrival.message()))
        mine = Guest(found.address, 0, 1)
        thread = mine.start()
        ((plan, _),) = found.gather(LIMIT_S)
        assert plan.host == "node0"
        assert not stranger.poll(200), "not a byte comes back"
        found.dismiss(0)
    thread.join(LIMIT_S)
    assert mine.status == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"version": "0.0"}, "rank 1 on node1 has Poseidon 0.0, rank 0 has"),
        ({"size": 3}, "rank 1 on node1 expects 3 tasks, rank 0 2"),
    ],
)
def test_a_task_that_does_not_belong_here(wrong: dict[str, object], message: str) -> None:
    with rendezvous(2) as found:
        guest = Guest(found.address, 1, 2)
        for name, value in wrong.items():
            setattr(guest, name, value)
        thread = guest.start()
        with pytest.raises(JobError, match=message):
            found.gather(LIMIT_S)
        thread.join(LIMIT_S)
    assert message in guest.error


def test_a_host_that_is_lost_ends_its_programs_for_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.cluster.rendezvous.server.SILENCE_S", 1.0)
    monkeypatch.setattr("poseidon.cluster.rendezvous.task.HEARTBEAT_S", LIMIT_S)
    with gathered(1) as (found, _, (host,)):
        talk = host.open(["sleep", "600"])
        assert talk.receive() is None, "the end of the line"
        assert (talk.status(LIMIT_S), host.alive) == (-1, False)
        with pytest.raises(JobError, match=r"rank 0 \(node0\): its task is lost"):
            host.open(["true"])
        with pytest.raises(OSError, match="is lost"):
            talk.send(b"more")
        found.dismiss(1)


def test_tasks_may_join_long_after_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers start tasks as places become free: those that wait have nothing to send, and
    are not lost.
    """
    now_s = [1000.0]
    monkeypatch.setattr(
        "poseidon.cluster.rendezvous.server.time", SimpleNamespace(monotonic=lambda: now_s[0])
    )
    with rendezvous(2) as found:
        threads = [Guest(found.address, 0, 2).start()]
        until(lambda: len(found._members) == 1, "rank 0 did not join", LIMIT_S)
        now_s[0] += 3600.0
        threads.append(Guest(found.address, 1, 2).start())
        talks = [host.open(["true"]) for _, host in found.gather(LIMIT_S)]
        assert [talk.status(LIMIT_S) for talk in talks] == [0, 0]
        found.dismiss(0)
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def test_rank_0_that_falls_silent_is_lost_to_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.cluster.rendezvous.task.SILENCE_S", 1.0)
    monkeypatch.setattr("poseidon.cluster.rendezvous.server.HEARTBEAT_S", LIMIT_S)
    with gathered(1) as (_, guests, (host,)):
        talk = host.open([sys.executable, "-u", "-c", SLEEP])
        pid = int(talk.receive() or b"")
        assert guests[0].gone.wait(LIMIT_S)
        assert not psutil.pid_exists(pid)
    assert "has sent nothing for 1 s" in guests[0].error


def test_a_task_that_is_asked_to_end_tells_rank_0() -> None:
    asked: list[str] = []
    heard = threading.Event()

    def on_signal(name: str) -> None:
        asked.append(name)
        heard.set()

    with rendezvous(1, on_signal=on_signal) as found:
        guest = Guest(found.address, 0, 1)
        thread = guest.start()
        ((_, host),) = found.gather(LIMIT_S)
        host.run(["true"], timeout_s=LIMIT_S)  # it has heard that all have come
        guest.asked.append("SIGTERM")
        assert heard.wait(LIMIT_S)
        found.dismiss(0)
    thread.join(LIMIT_S)
    assert asked == ["SIGTERM"] and guest.status == 0


def test_a_port_that_is_taken() -> None:
    with (
        rendezvous(1) as found,
        pytest.raises(JobError, match="Address already in use; --rendezvous_port names another"),
    ):
        RendezvousServer(
            "127.0.0.1", int(found.address.rpartition(":")[2]), server_keys(KEY), size=1
        )


def test_nothing_secret_is_seen(tmp_path: Path) -> None:
    with gathered(1) as (found, guests, _):
        assert KEY.decode() not in f"{found.__dict__}"
        found.dismiss(0)
    assert guests[0].status == 0


def test_an_exception_of_the_servers_thread_ends_every_wait() -> None:
    def fail(name: str) -> None:
        raise RuntimeError(f"nothing can be done about {name}")

    with rendezvous(2, on_signal=fail) as found:
        guest = Guest(found.address, 0, 2)
        thread = guest.start()
        other = Guest(found.address, 1, 2)
        others = other.start()
        (_, host), *_ = found.gather(LIMIT_S)
        talk = host.open([sys.executable, "-u", "-c", SLEEP])
        assert talk.receive()
        guest.asked.append("SIGTERM")
        assert talk.receive() is None
        assert not host.alive
        with pytest.raises(JobError, match="nothing can be done about SIGTERM"):
            found.gather(LIMIT_S)
    assert guest.gone.wait(LIMIT_S) and other.gone.wait(LIMIT_S)
    thread.join(LIMIT_S)
    others.join(LIMIT_S)


def test_a_failure_of_the_own_task_ends_the_wait_for_the_others() -> None:
    with rendezvous(2) as found:
        threading.Timer(0.2, found.abort, args=["rank 0's own task failed"]).start()
        with pytest.raises(JobError, match="rank 0's own task failed"):
            found.gather(LIMIT_S)
        found.abort("a later one does not count")
        with pytest.raises(JobError, match="rank 0's own task failed"):
            found.gather(LIMIT_S)
