"""The launcher goes on from the newest whole snapshot of its own job, and from no other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from poseidon.cluster.plan import ProcessName, Role
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.launch.snapshot_ledger import SnapshotLedger
from poseidon.snapshot.checksums import seal, sums_path
from poseidon.snapshot.files import model_path, state_path

WORKER_0 = ProcessName(role=Role.WORKER, index=0, client=0, host="127.0.0.1")
ORIGIN = StartingPoint(state="began_here.solverstate", iteration=3)


class Silent:
    """Callbacks that count."""

    def __init__(self) -> None:
        self.events = 0

    def on_started(self) -> None: ...

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        self.events += 1

    def on_log(self, name: ProcessName, line: str) -> None: ...


def write(folder: Path, iteration: int) -> Path:
    state, model = state_path(folder / "snap", iteration), model_path(folder / "snap", iteration)
    state.write_bytes(b"state")
    model.write_bytes(b"model")
    seal(state, model)
    return state


def ledger_of(states: list[Path], warnings: list[str]) -> SnapshotLedger:
    inner = Silent()
    ledger = SnapshotLedger(inner, warnings.append)
    for index, state in enumerate(states, start=1):
        ledger.on_event(WORKER_0, {"event": "snapshot", "state": str(state), "iteration": 10 * index})
    assert inner.events == len(states)
    return ledger


def test_the_newest(tmp_path: Path) -> None:
    states = [write(tmp_path, iteration) for iteration in (10, 20)]
    write(tmp_path, 30)  # an earlier run's: this job never told of it
    found = ledger_of(states, []).newest_whole(ORIGIN)
    assert found == StartingPoint(state=str(states[1]), iteration=20)


@pytest.mark.parametrize("spoil", ["state", "model", "sums"])
def test_a_damaged_one_is_passed_over_for_the_one_before(tmp_path: Path, spoil: str) -> None:
    states = [write(tmp_path, iteration) for iteration in (10, 20)]
    path = {"state": states[1], "model": model_path(tmp_path / "snap", 20), "sums": sums_path(states[1])}[
        spoil
    ]
    path.write_bytes(path.read_bytes()[:-3])
    warnings: list[str] = []
    ledger = ledger_of(states, warnings)
    assert ledger.newest_whole(ORIGIN) == StartingPoint(state=str(states[0]), iteration=10)
    assert (
        len(warnings) == 1 and path.name in warnings[0] and warnings[0].startswith("passed over a snapshot: ")
    )
    sums_path(states[0]).unlink()
    assert ledger.newest_whole(ORIGIN) == ORIGIN


def test_one_that_was_removed_is_passed_over_in_silence(tmp_path: Path) -> None:
    state = write(tmp_path, 10)
    warnings: list[str] = []
    ledger = ledger_of([state], warnings)
    for path in tmp_path.iterdir():
        path.unlink()
    assert ledger.newest_whole(ORIGIN) == ORIGIN
    assert warnings == []


@pytest.mark.parametrize("event", [{}, {"state": 7, "iteration": 10}, {"state": "x", "iteration": "ten"}])
def test_what_is_no_snapshot_is_not_listed(event: dict[str, object]) -> None:
    ledger = SnapshotLedger(Silent(), print)
    ledger.on_event(WORKER_0, {"event": "snapshot", **event})
    assert ledger.newest_whole(ORIGIN) == ORIGIN
