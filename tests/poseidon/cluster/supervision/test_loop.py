"""Jobs of true processes: they end well, or end at once with one sentence, and leave nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from poseidon.base.text_files import OutputLine
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.dial.dialer import dial_here
from poseidon.cluster.job_plan import ProcessName, Role, ShardPlan, WorkerPlan, plan_job
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registration, Registry
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import Listener, OutputStream, ProcessSpec
from poseidon.cluster.supervision.loop import JobListener, run_job
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.state import JobResult, Outcome, SupervisionSettings
from poseidon.errors import JobError
from tests.support.job_child import ENDLESS_WORKER, SHARD, WORKER, child
from tests.support.live_processes import live_pids
from tests.support.polling import until

pytestmark = pytest.mark.processes

PLAN = plan_job(
    [Host(id=0, address="127.0.0.1", port=0), Host(id=1, address="localhost", port=0)],
    devices_per_host=("cpu",),
    channels=1,
)


class Remembering(JobListener):
    """A launcher that remembers what it started, and a listener that remembers what it received."""

    def __init__(
        self, react: Callable[[Remembering, ProcessName, Mapping[str, object]], None] | None = None
    ) -> None:
        self._react = react
        self._agent: RemoteAgent | None = None
        self.pids: dict[str, int] = {}
        self.log: list[tuple[str, str]] = []
        self.events: list[tuple[str, str]] = []
        self.started = 0

    def start(self, spec: ProcessSpec, client: Host, listener: Listener) -> RemoteProcess:
        self._agent = self._agent or dial_here()
        process = self._agent.start(spec, listener)
        self.pids[spec.name.short] = process.pid
        return process

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()

    def on_started(self) -> None:
        self.started += 1

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        if event["event"] != "alive":
            self.events.append((name.short, str(event["event"])))
        if self._react is not None:
            self._react(self, name, event)

    def on_log(self, name: ProcessName, stream: OutputStream, line: OutputLine) -> None:
        self.log.append((name.short, line.text))


NO_RECORD: Any = SimpleNamespace(add=lambda *_: None, keep=lambda _: None)


def threads_of_poseidon() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("poseidon")]


def run(
    seen: Remembering,
    *,
    worker: str = ENDLESS_WORKER,
    worker_1: str | None = None,
    shard: str = SHARD,
    registration: Registration | None = None,
    settings: SupervisionSettings | None = None,
    requests: SignalRequests | None = None,
) -> JobResult:
    def make_spec(role: WorkerPlan | ShardPlan) -> ProcessSpec:
        name = role.process
        script = (
            shard
            if name.role is Role.SHARD
            else worker_1
            if worker_1 and name.index == 1
            else worker
        )
        return ProcessSpec(name=name, argv=child(script), first_line=b"{}")

    settings = settings or SupervisionSettings(grace_s=1.0)
    try:
        with nullcontext(requests) if requests else SignalRequests(settings) as entered:
            return run_job(
                PLAN,
                make_spec,
                seen.start,
                listener=seen,
                settings=settings,
                registration=registration or NO_RECORD,
                requests=entered,
            )
    finally:
        left = live_pids(seen.pids.values())
        seen.close()
        assert not left
        until(lambda: not threads_of_poseidon(), "a thread is left", 10.0)


def registration(folder: Path) -> Registration:
    launcher = RecordedProcess(
        name="the launcher", host="127.0.0.1", pid=os.getpid(), created="1.0"
    )
    record = JobRecord(
        job="job", launcher=launcher, hostfile=None, hosts=PLAN.hosts, output="/out", started_s=0.0
    )
    return Registration(Registry(folder), record)


def assert_none_on_record(folder: Path) -> None:
    """The job is there, as it is until whoever put it on record takes it off, and has no
    process.
    """
    record = Registry(folder).read("job")
    assert record is not None and record.processes == ()


def on_progress(act: Callable[[Remembering], None], index: int = 1) -> Remembering:
    """Act once, when a worker first tells of its progress."""
    acted: list[bool] = []

    def react(seen: Remembering, name: ProcessName, event: Mapping[str, object]) -> None:
        if event["event"] == "progress" and name.index == index and not acted:
            acted.append(True)
            act(seen)

    return Remembering(react)


def test_a_good_job(tmp_path: Path) -> None:
    seen = Remembering()
    result = run(seen, worker=WORKER, registration=registration(tmp_path))
    assert (result.outcome, result.iteration) == (Outcome.FINISHED, 120)
    assert seen.started == 1
    assert set(seen.pids) == {"shard 0", "shard 1", "worker 0", "worker 1"}
    assert [event for name, event in seen.events if name == "worker 1"] == [
        "ready",
        "progress",
        "progress",
        "done",
    ]
    assert_none_on_record(tmp_path)


def test_each_process_is_on_record_while_it_runs(tmp_path: Path) -> None:
    recorded = []

    def look(seen: Remembering) -> None:
        record = Registry(tmp_path).read("job")
        assert record is not None
        recorded.extend((process.name, process.pid) for process in record.processes)
        os.kill(os.getpid(), signal.SIGTERM)

    seen = on_progress(look, index=0)
    run(seen, worker_1=WORKER, registration=registration(tmp_path))
    assert [pid for _, pid in recorded] == list(seen.pids.values())
    assert recorded[3][0] == "worker 1 (client 1, localhost)"


@pytest.mark.parametrize("victim", ["worker 0", "shard 1"])
def test_a_killed_process_ends_the_job(tmp_path: Path, victim: str) -> None:
    seen = on_progress(lambda seen: os.kill(seen.pids[victim], signal.SIGKILL))
    with pytest.raises(JobError) as caught:
        run(seen, registration=registration(tmp_path))
    client = "client 0, 127.0.0.1" if victim == "worker 0" else "client 1, localhost"
    assert str(caught.value).startswith(
        f"{victim} ({client}, pid {seen.pids[victim]}) was killed by signal 9 (SIGKILL)"
    )
    assert "; the job was stopped" in str(caught.value)
    assert_none_on_record(tmp_path)


def test_a_stopped_process_ends_the_job() -> None:
    seen = on_progress(lambda seen: os.kill(seen.pids["worker 1"], signal.SIGSTOP))
    with pytest.raises(JobError, match=r"worker 1 .* has sent no heartbeat for 1 s \(last seen"):
        run(seen, settings=SupervisionSettings(stall_timeout_s=1.0, grace_s=1.0))


def test_a_process_that_does_not_end_by_sigterm_is_killed() -> None:
    stubborn = "signal.signal(signal.SIGTERM, lambda *_: None)\n" + ENDLESS_WORKER
    seen = on_progress(lambda seen: os.kill(seen.pids["worker 1"], signal.SIGKILL))
    with pytest.raises(JobError, match="worker 1"):
        run(seen, worker=stubborn, settings=SupervisionSettings(grace_s=0.2))


def test_a_crash_shows_its_last_words() -> None:
    with pytest.raises(JobError, match=r"worker 1 .* exited with status 1 while it was starting"):
        run(Remembering(), worker_1="1 / 0")


def test_text_on_stdout_is_log() -> None:
    seen = Remembering()
    run(seen, worker=WORKER, worker_1="os.write(1, b'{not json\\n')\n" + WORKER)
    assert ("worker 1", "{not json") in seen.log


def test_a_process_that_cannot_be_started() -> None:
    class Broken(Remembering):
        def start(self, spec: ProcessSpec, client: Host, listener: Listener) -> RemoteProcess:
            if spec.name.role is Role.WORKER:
                raise JobError("cannot start worker 0: no python")
            return super().start(spec, client, listener)

    seen = Broken()
    with pytest.raises(JobError, match="cannot start worker 0: no python"):
        run(seen)
    assert set(seen.pids) == {"shard 0", "shard 1"}


def test_a_callback_that_raises_ends_the_processes() -> None:
    def fail(seen: Remembering) -> None:
        raise RuntimeError("callback")

    with pytest.raises(RuntimeError, match="callback"):
        run(on_progress(fail))


def send(*numbers: signal.Signals) -> Callable[[Remembering], None]:
    def act(seen: Remembering) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return act


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    # The second worker ends when it is told by the first, which here needs no telling.
    result = run(on_progress(send(number), index=0), worker_1=WORKER)
    assert (result.outcome, result.iteration) == (Outcome.STOPPED, 120)
    assert result.exit_code == 128 + number
    assert signal.getsignal(number) is before


def test_a_request_from_before_the_first_process_is_not_lost() -> None:
    with SignalRequests(SupervisionSettings()) as requests:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(JobError, match="stopped before it had started") as caught:
            run(Remembering(), requests=requests)
    assert caught.value.exit_code == 143


def test_a_hang_up_takes_a_snapshot() -> None:
    def react(seen: Remembering, name: ProcessName, event: Mapping[str, object]) -> None:
        if (name.index, event["event"]) == (0, "progress"):
            os.kill(os.getpid(), signal.SIGHUP)
        if event["event"] == "snapshot_taken":
            os.kill(os.getpid(), signal.SIGTERM)

    seen = Remembering(react)
    run(seen, worker_1=WORKER)
    assert ("worker 0", "snapshot_taken") in seen.events


def test_a_second_ctrl_c_kills_at_once() -> None:
    deaf = "beat()\nsay('ready')\nnext(commands())\nsay('progress', iteration=5)\nforever()"
    with pytest.raises(JobError, match="second request to stop"):
        run(on_progress(send(signal.SIGINT, signal.SIGINT)), worker=deaf)
