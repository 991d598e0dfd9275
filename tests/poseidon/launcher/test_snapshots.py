"""A job restarts from its newest whole snapshot; snapshots of another host come here whole, or not
at all.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from poseidon.caffe.snapshot.caffemodel import model_path, state_path
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.state import Outcome, SupervisionSettings
from poseidon.engine.snapshot_files import check, seal, sums_path
from poseidon.errors import JobError
from poseidon.launcher import snapshots
from poseidon.launcher.snapshots import ARRIVING, KEPT, SnapshotCopies, SnapshotList
from tests.support.flushes import watch_flushes

FAR = Path("/far")
WORKER_0 = ProcessName(role=Role.WORKER, index=0, client=0, host="127.0.0.1")
ORIGIN = StartingPoint(state="began_here.solverstate", iteration=3)


class FarAgent:
    """The agent of a host on which the folder `root` is called /far."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.got: list[str] = []

    def read_file(
        self, path: str, write: Callable[[bytes], object], *, limit: int = 1 << 62
    ) -> int:
        here = self._root / Path(path).relative_to(FAR)
        if not here.is_file() or here.stat().st_size > limit:
            raise JobError(f"{path} is not a file of at most {limit} bytes")
        content = here.read_bytes()
        if limit == 1 << 62:  # the checksums are read, to compare them
            self.got.append(path)
        self.pass_on(content, write)
        return len(content)

    def pass_on(self, content: bytes, write: Callable[[bytes], object]) -> None:
        write(content[:3])
        write(content[3:])


class SlowAgent(FarAgent):
    """One whose files come when they are let go, the beginning of each before."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.under_way, self.let_go = threading.Event(), threading.Event()

    def pass_on(self, content: bytes, write: Callable[[bytes], object]) -> None:
        if content.startswith((b"state", b"model")):
            write(content[:3])
            self.under_way.set()
            assert self.let_go.wait(30)
            content = content[3:]
        write(content)


def write(folder: Path, iteration: int) -> Path:
    state, model = state_path(folder / "snap", iteration), model_path(folder / "snap", iteration)
    state.write_bytes(b"state %d" % iteration)
    model.write_bytes(b"model %d" % iteration)
    seal(state, model)
    return state


class Site:
    """Copies from a far folder, and what they said."""

    def __init__(self, folder: Path) -> None:
        self.far, self.here = folder / "far", folder / "here"
        self.far.mkdir()
        self.arrived: list[Path] = []
        self.warnings: list[str] = []
        self.agent = FarAgent(self.far)
        self.copies = SnapshotCopies(self.here, self.agent_there, self.warnings.append)

    def agent_there(self) -> RemoteAgent:
        return self.agent  # type: ignore[return-value]

    def bring(self, state: Path) -> None:
        self.copies.fetch(str(FAR / state.name), self.arrived.append)
        self.copies.wait()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.copies.close()
    if isinstance(site.agent, SlowAgent):
        site.agent.let_go.set()
    site.copies._thread.join(60)
    assert not site.copies._thread.is_alive()


def test_a_snapshot_comes_whole_and_older_ones_go(site: Site) -> None:
    states = [write(site.far, iteration) for iteration in (10, 20, 30)]
    for state in states:
        site.bring(state)
    assert site.arrived == [site.here / state.name for state in states]
    assert site.warnings == []
    for state in states[-KEPT:]:
        check(site.here / state.name)
        assert (site.here / state.name).read_bytes() == state.read_bytes()
    assert len(list(site.here.iterdir())) == 3 * KEPT


def test_one_that_does_not_come_whole_is_passed_over(site: Site) -> None:
    state = write(site.far, 10)
    state.write_bytes(b"cut")
    site.bring(state)
    assert site.arrived == []
    assert "arrived incomplete" in site.warnings[0]


@pytest.fixture
def twin(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A snapshot of this machine; there is another one, or the same, under its path on the far
    machine.
    """
    (tmp_path / "shared").mkdir()
    monkeypatch.setattr(f"{__name__}.FAR", tmp_path / "shared")
    return write(tmp_path / "shared", 10)


def test_one_that_is_here_is_not_copied(site: Site, twin: Path) -> None:
    write(site.far, 10)
    site.bring(twin)
    assert site.arrived == [twin]
    assert site.agent.got == []
    assert not site.here.exists()


@pytest.mark.parametrize("damaged", [False, True])
def test_another_one_under_the_same_path_is_not_taken_for_it(
    site: Site, twin: Path, damaged: bool
) -> None:
    far = write(site.far, 10)
    if not damaged:
        far.write_bytes(b"of the job")
        seal(far, model_path(far.parent / "snap", 10))
    else:
        twin.write_bytes(b"cut")
    site.bring(twin)
    assert site.arrived == [site.here / far.name]
    assert site.arrived[0].read_bytes() == far.read_bytes()
    check(site.arrived[0])


@contextmanager
def broken(site: Site, error: Exception) -> Iterator[None]:
    def refuse(*_: object, **__: object) -> int:
        raise error

    site.agent = SimpleNamespace(read_file=refuse)  # type: ignore[assignment]
    yield


@pytest.mark.parametrize(
    "error", [JobError("no line"), OSError("no line"), EOFError("no line"), KeyError("no line")]
)
def test_what_cannot_be_had_is_a_warning(site: Site, error: Exception) -> None:
    with broken(site, error):
        site.bring(write(site.far, 10))
    assert site.arrived == []
    assert "no line" in site.warnings[0]


def test_nothing_but_plain_small_files_is_taken(site: Site) -> None:
    state = write(site.far, 10)
    sums_path(state).write_bytes(b"x" * 5000)
    site.bring(state)
    sums_path(state).unlink()
    sums_path(state).mkdir()
    site.bring(state)
    sums_path(state).rmdir()
    sums_path(state).write_text(f"{'0' * 64}  ../../escape\n")
    site.bring(state)
    assert site.arrived == []
    assert len(site.warnings) == 3
    assert not list(site.here.parent.glob("escape"))


@pytest.fixture
def slow(site: Site) -> SlowAgent:
    site.agent = SlowAgent(site.far)
    return site.agent


def requests(*signals: signal.Signals) -> SignalRequests:
    """Return the requests of a launcher that was sent these signals."""
    sent = SignalRequests(SupervisionSettings())
    for number in signals:
        sent._receive(number, None)
    return sent


def under_way(site: Site, slow: SlowAgent) -> Path:
    state = write(site.far, 10)
    site.copies.fetch(str(FAR / state.name), site.arrived.append)
    assert slow.under_way.wait(60)
    return state


def test_what_is_under_way_has_no_name_yet(site: Site, slow: SlowAgent) -> None:
    state = under_way(site, slow)
    assert [path.name for path in site.here.iterdir()] == [ARRIVING]
    slow.let_go.set()
    site.copies.finish(Outcome.FINISHED, requests())
    assert site.arrived == [site.here / state.name]
    check(site.arrived[0])
    assert len(list(site.here.iterdir())) == 3


def test_copies_are_on_disk_before_they_have_their_names(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = write(site.far, 10)
    seen = watch_flushes(monkeypatch)
    site.bring(state)
    names = [path.name for path in (model_path(state.parent / "snap", 10), state, sums_path(state))]
    assert [flush.path.name for flush in seen if flush.path.parent.name == ARRIVING][:3] == names
    whole = [flush.holds - {ARRIVING} for flush in seen if flush.holds is not None]
    assert whole == [set(names[:count]) for count in (1, 2, 3)]


def test_what_a_killed_launcher_left_goes(site: Site) -> None:
    (site.here / ARRIVING).mkdir(parents=True)
    (site.here / ARRIVING / "snap_iter_5.caffemodel").write_bytes(b"half")
    site.bring(write(site.far, 10))
    assert len(list(site.here.iterdir())) == 3


def test_a_job_that_ends_leaves_nothing_half_done(site: Site, slow: SlowAgent) -> None:
    state = under_way(site, slow)
    site.copies.close()
    slow.let_go.set()
    site.copies._thread.join(60)
    assert (site.arrived, list(site.here.iterdir())) == ([], [])
    assert site.warnings == [
        f"not copied here, but left on the host of worker 0: {FAR / state.name}"
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_wish_to_stop_ends_the_waiting(
    site: Site, slow: SlowAgent, number: signal.Signals
) -> None:
    under_way(site, slow)
    site.copies.finish(Outcome.FINISHED, requests(number))
    assert (len(site.warnings), site.arrived) == (1, [])


def test_a_stopped_job_waits_a_moment_only(
    site: Site, slow: SlowAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "STOPPED_WAIT_S", 0.0)
    under_way(site, slow)
    site.copies.finish(Outcome.STOPPED, requests())
    assert (site.warnings, site.arrived) == ([], [])


def snapshots_of(states: list[Path], warnings: list[str]) -> SnapshotList:
    listed = SnapshotList(ORIGIN, warnings.append)
    for index, state in enumerate(states, start=1):
        listed.on_event(
            WORKER_0, {"event": "snapshot", "state": str(state), "iteration": 10 * index}
        )
    return listed


def test_the_newest(tmp_path: Path) -> None:
    states = [write(tmp_path, iteration) for iteration in (10, 20)]
    write(tmp_path, 30)  # an earlier run's: this job never told of it
    found = snapshots_of(states, []).newest_intact()
    assert found == StartingPoint(state=str(states[1]), iteration=20)


def test_one_may_come_while_the_newest_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [write(tmp_path, iteration) for iteration in (10, 20)]
    listed = snapshots_of(states, [])
    exists = Path.exists

    def come(path: Path) -> bool:  # as from the thread that copies
        event = {"event": "snapshot", "state": str(tmp_path / "late"), "iteration": 30}
        listed.on_event(WORKER_0, event)
        return exists(path)

    monkeypatch.setattr(Path, "exists", come)
    assert listed.newest() == StartingPoint(state=str(states[1]), iteration=20)


@pytest.mark.parametrize("spoil", ["state", "model", "sums"])
def test_a_damaged_one_is_passed_over_for_the_one_before(tmp_path: Path, spoil: str) -> None:
    states = [write(tmp_path, iteration) for iteration in (10, 20)]
    path = {
        "state": states[1],
        "model": model_path(tmp_path / "snap", 20),
        "sums": sums_path(states[1]),
    }[spoil]
    path.write_bytes(path.read_bytes()[:-3])
    warnings: list[str] = []
    listed = snapshots_of(states, warnings)
    assert listed.newest_intact() == StartingPoint(state=str(states[0]), iteration=10)
    assert (
        len(warnings) == 1
        and path.name in warnings[0]
        and warnings[0].startswith("skipped a snapshot: ")
    )
    sums_path(states[0]).unlink()
    assert listed.newest_intact() == ORIGIN


def test_one_that_was_removed_is_passed_over_in_silence(tmp_path: Path) -> None:
    state = write(tmp_path, 10)
    warnings: list[str] = []
    listed = snapshots_of([state], warnings)
    for path in tmp_path.iterdir():
        path.unlink()
    assert listed.newest_intact() == ORIGIN
    assert warnings == []


@pytest.mark.parametrize(
    "event", [{}, {"state": 7, "iteration": 10}, {"state": "x", "iteration": "ten"}]
)
def test_what_is_no_snapshot_is_not_listed(event: dict[str, object]) -> None:
    listed = SnapshotList(ORIGIN, print)
    listed.on_event(WORKER_0, {"event": "snapshot", **event})
    assert listed.newest_intact() == ORIGIN
