"""Running a job: what it waits for at its end, what stops a pause, and which hosts it goes on
with.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from poseidon.base.paths import short_path
from poseidon.cluster.dial.dialer import LocalDialer, Needs
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.jobs.registry import JobRecord
from poseidon.cluster.machinefile import Host, parse_machinefile
from poseidon.cluster.supervision.background import StartReport
from poseidon.cluster.supervision.restarts import RestartedJob, Restarts, StartingPoint
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.state import JobResult, Outcome
from poseidon.errors import JobError
from poseidon.launcher.request import JobRequest
from poseidon.launcher.runner import _JobRun, run
from poseidon.launcher.site import FileSet, Site
from poseidon.launcher.snapshots import SnapshotCopies
from tests.support.fake_job import FakeJob

DONE = JobResult(outcome=Outcome.FINISHED, iteration=9)


class RecordingCopies(SnapshotCopies):
    """Notes what a job asks of its snapshots."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def fetch(self, state: str, arrived: Callable[[Path], None]) -> None:
        arrived(Path(state))

    def wait(self) -> None:
        pass

    def finish(self, outcome: Outcome, requests: SignalRequests) -> None:
        self.calls.append(outcome)

    def close(self) -> None:
        self.calls.append("close")


class FakeSite(Site):
    """Hosts that are never connected; the first one goes missing."""

    def __init__(self, machinefile: str) -> None:
        super().__init__(parse_machinefile(machinefile, source="hosts"), LocalDialer())
        self.copies = RecordingCopies()
        self.calls: list[str] = []
        self.began: Callable[[], object] = list

    def prepare(self, job: str, needs: Needs) -> None:
        self.calls.append("prepare")

    def begin(self, record: JobRecord | None, files: Sequence[FileSet] = ()) -> None:
        self.calls.append("begin")
        self.began()

    def end(self) -> None:
        self.calls.append("end")

    def snapshot_copies(
        self, writer: Callable[[], Host], folder: Path, warn: Callable[[str], None]
    ) -> SnapshotCopies:
        return self.copies

    def drop_missing(self) -> tuple[Host, ...]:
        missing, self.hosts = self.hosts[:1], self.hosts[1:]
        return missing

    def close(self) -> None:
        self.calls.append("close")


class SharingJob(FakeJob):
    """A job whose hosts may read the same data."""

    shared = False

    def shares_data(self) -> bool:
        return self.shared


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def make_job(machinefile: str = "0 a 0", *, shared: bool = False) -> tuple[SharingJob, FakeSite]:
    site = FakeSite(machinefile)
    job = SharingJob(
        JobRequest(output=Path("out")), site, title="fake", stem="fake", devices=("cpu",)
    )
    job.shared = shared
    return job, site


@pytest.mark.parametrize("fails", [False, True])
def test_only_a_job_that_ends_well_waits_for_its_snapshots(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    def run_starts(_: object) -> RestartedJob:
        if fails:
            raise JobError("lost")
        return RestartedJob(result=DONE, restarts=0, repeated=0)

    monkeypatch.setattr(Restarts, "run", run_starts)
    job, site = make_job()
    if fails:
        with pytest.raises(JobError):
            run(job, StartReport(None))
    else:
        assert run(job, StartReport(None)) == 0
        assert f"job {job.id} finished at iteration 9" in capsys.readouterr().err
    assert site.copies.calls == (["close"] if fails else [Outcome.FINISHED, "close"])
    assert site.calls == ["prepare", "close"]
    assert job.output.exists() is not fails


def test_a_failed_job_with_a_snapshot_prints_how_to_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_starts(starts: Restarts) -> RestartedJob:
        driver = cast(_JobRun, starts._driver)
        state = driver._job.output / "net_iter_5.solverstate"
        state.write_bytes(b"")
        driver._snapshots.on_event(
            ProcessName(role=Role.WORKER, index=0, client=0, host="a"),
            {"event": "snapshot", "iteration": 5, "state": str(state)},
        )
        raise JobError("lost")

    monkeypatch.setattr(Restarts, "run", run_starts)
    job, _ = make_job()
    job.request = replace(job.request, argv=("train", "--solver=s"))
    with pytest.raises(JobError):
        run(job, StartReport(None))
    resume = "  resume:  poseidon train --solver=s --snapshot=out\n"
    assert resume in capsys.readouterr().err


@contextmanager
def running(job: SharingJob) -> Iterator[_JobRun]:
    found = _JobRun(job, None, StartReport(None))  # type: ignore[arg-type]
    with found._requests:
        yield found


@pytest.mark.parametrize(
    ("number", "stops"), [(signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGHUP, False)]
)
def test_a_signal_in_the_pause(number: signal.Signals, stops: bool) -> None:
    with running(make_job()[0]) as found:
        os.kill(os.getpid(), number)
        assert found.pause(600.0 if stops else 0.15) is stops


def test_what_a_job_that_is_lost_may_be_started_with() -> None:
    with running(make_job()[0]) as found:
        assert found.how_to_restart() == (
            "with --max_restarts=N it continues from the beginning by itself"
        )
        state = found._job.output / "net_iter_5.solverstate"
        found._job.output.mkdir()
        state.write_bytes(b"")
        found._snapshots._written[5] = state
        assert f"continues from {short_path(state)} by itself" in found.how_to_restart()
        found._job.request = replace(found._job.request, max_restarts=0)
        assert found.how_to_restart() == ""


@pytest.mark.parametrize(
    ("machinefile", "why"), [("0 a 0", ""), ("0 a 0\n1 b 0", "each host has its own work")]
)
def test_why_a_restart_is_from_disk(machinefile: str, why: str) -> None:
    with running(make_job(machinefile)[0]) as found:
        assert found.from_disk_because() == why


@pytest.mark.parametrize("importing", [False, True])
def test_a_job_that_is_stopped_while_its_hosts_are_made_ready_starts_nothing(
    importing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, site = make_job("0 127.0.0.1 0")
    site.began = lambda: os.kill(os.getpid(), signal.SIGTERM)
    unfinished = [threading.Event()] if importing else []
    monkeypatch.setattr(job, "import_ahead", lambda: unfinished)
    with running(job) as found:
        found._registration = SimpleNamespace(record=None)  # type: ignore[assignment]
        with pytest.raises(JobError, match="the job was stopped before") as caught:
            found.start(0, StartingPoint())
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert site.calls == ["begin", "end"]


@pytest.mark.parametrize(("restarts", "warns"), [(0, True), (1, False)])
def test_snapshots_in_memory_that_have_no_effect_are_a_warning(
    restarts: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("poseidon.launcher.runner.run_job", lambda *_, **__: DONE)
    monkeypatch.setattr(SharingJob, "bound_because", "")
    job, site = make_job("0 127.0.0.1 0")
    monkeypatch.setattr(job, "spec", lambda role, _: role)
    monkeypatch.setattr(site.paused, "end_others", lambda *_: [])
    job.request = replace(job.request, memory_snapshot_every=20, max_restarts=restarts)
    with running(job) as found:
        found._registration = SimpleNamespace(record=None, keep=list)  # type: ignore[assignment]
        for attempt in range(2):
            found.start(attempt, StartingPoint())
    warning = "warning: --elastic=every has no effect, because --max_restarts is 0\n"
    assert capsys.readouterr().err.count(warning) == warns


def test_a_job_without_snapshots_starts_where_it_began(capsys: pytest.CaptureFixture[str]) -> None:
    with running(make_job()[0]) as found:
        assert found.starting_point() == StartingPoint()
        found.report("a line")
    assert capsys.readouterr().err == "a line\n"


@pytest.mark.parametrize(
    ("machinefile", "shared", "says"),
    [
        ("0 a 0\n1 b 0\n2 c "
"0", True, "continuing without client 0 (a): 2 clients, 2 workers, 2 "
"shards from here on"),
        ("0 a 0\n1 b 0\n2 c 0", False, ""),
        ("0 a 0 role=server\n1 b 0 role=worker\n2 c 0 role=worker", True, ""),
    ],
)  # fmt: skip
def test_a_job_goes_on_where_the_data_is_shared_and_a_shard_is_left(
    machinefile: str, shared: bool, says: str
) -> None:
    with running(make_job(machinefile, shared=shared)[0]) as found:
        assert found.drop_missing_hosts() == says


@pytest.mark.parametrize(
    ("machinefile", "restarts"), [("0 a 0\n1 b 0", 3), ("0 127.0.0.1 0\n1 localhost 0", 0)]
)
def test_a_job_on_several_hosts_restarts_by_itself(machinefile: str, restarts: int) -> None:
    job, _ = make_job(machinefile)
    assert job.max_restarts == restarts
    job.restarts_by_itself = False
    assert job.max_restarts == 0
    job.request = replace(job.request, max_restarts=5)
    assert job.max_restarts == 5
