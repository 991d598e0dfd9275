"""The launcher goes on from the newest whole snapshot of its own job, and from no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.cluster.plan import ProcessName, Role
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.launch.snapshot_list import SnapshotList
from poseidon.snapshot.checksums import seal, sums_path
from poseidon.snapshot.files import model_path, state_path

WORKER_0 = ProcessName(role=Role.WORKER, index=0, client=0, host="127.0.0.1")
ORIGIN = StartingPoint(state="began_here.solverstate", iteration=3)


def write(folder: Path, iteration: int) -> Path:
    state, model = state_path(folder / "snap", iteration), model_path(folder / "snap", iteration)
    state.write_bytes(b"state")
    model.write_bytes(b"model")
    seal(state, model)
    return state


def snapshots_of(states: list[Path], warnings: list[str]) -> SnapshotList:
    snapshots = SnapshotList(ORIGIN, warnings.append)
    for index, state in enumerate(states, start=1):
        snapshots.on_event(WORKER_0, {"event": "snapshot", "state": str(state), "iteration": 10 * index})
    return snapshots


def test_the_newest(tmp_path: Path) -> None:
    states = [write(tmp_path, iteration) for iteration in (10, 20)]
    write(tmp_path, 30)  # an earlier run's: this job never told of it
    found = snapshots_of(states, []).newest_intact()
    assert found == StartingPoint(state=str(states[1]), iteration=20)


@pytest.mark.parametrize("spoil", ["state", "model", "sums"])
def test_a_damaged_one_is_passed_over_for_the_one_before(tmp_path: Path, spoil: str) -> None:
    states = [write(tmp_path, iteration) for iteration in (10, 20)]
    path = {"state": states[1], "model": model_path(tmp_path / "snap", 20), "sums": sums_path(states[1])}[
        spoil
    ]
    path.write_bytes(path.read_bytes()[:-3])
    warnings: list[str] = []
    snapshots = snapshots_of(states, warnings)
    assert snapshots.newest_intact() == StartingPoint(state=str(states[0]), iteration=10)
    assert (
        len(warnings) == 1 and path.name in warnings[0] and warnings[0].startswith("passed over a snapshot: ")
    )
    sums_path(states[0]).unlink()
    assert snapshots.newest_intact() == ORIGIN


def test_one_that_was_removed_is_passed_over_in_silence(tmp_path: Path) -> None:
    state = write(tmp_path, 10)
    warnings: list[str] = []
    snapshots = snapshots_of([state], warnings)
    for path in tmp_path.iterdir():
        path.unlink()
    assert snapshots.newest_intact() == ORIGIN
    assert warnings == []


@pytest.mark.parametrize("event", [{}, {"state": 7, "iteration": 10}, {"state": "x", "iteration": "ten"}])
def test_what_is_no_snapshot_is_not_listed(event: dict[str, object]) -> None:
    snapshots = SnapshotList(ORIGIN, print)
    snapshots.on_event(WORKER_0, {"event": "snapshot", **event})
    assert snapshots.newest_intact() == ORIGIN
