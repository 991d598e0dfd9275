"""Solver states: Caffe's order, both ways, and misfits named."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.proto.caffe_pb2 import PoseidonState, SolverState
from poseidon.caffe.snapshot.solverstate import (
    RunState,
    learned_net,
    read_head,
    read_state,
    write_state,
)
from poseidon.engine.snapshot_files import find_damage, seal, sealed_files
from poseidon.errors import SnapshotError

BLOBS = [("ip1.0", (6, 5)), ("ip1.1", (6,)), ("ip2.0", (4, 6)), ("ip2.1", (4,))]


def state(arrays: int) -> RunState:
    histories = tuple(
        tuple(np.full(shape, 10 * a + i, dtype=np.float32) for a in range(arrays))
        for i, (_, shape) in enumerate(BLOBS)
    )
    extra = PoseidonState(workers=2, random_seed=99)
    return RunState(iteration=12, model="m_iter_12.caffemodel", histories=histories, poseidon=extra)


@pytest.mark.parametrize("arrays", [1, 2])
def test_round_trip_in_caffes_order(tmp_path: Path, arrays: int) -> None:
    path = tmp_path / "s.solverstate"
    write_state(path, state(arrays))
    found = read_state(path, BLOBS, arrays)
    assert (found.iteration, found.poseidon.workers, read_head(path).seed) == (12, 2, 99)
    for mine, theirs in zip(found.histories, state(arrays).histories, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert np.array_equal(a, b)
    raw = SolverState.FromString(path.read_bytes())
    firsts = [blob.data[0] for blob in raw.history]
    assert firsts == [0, 1, 2, 3, 10, 11, 12, 13][: 4 * arrays]


@pytest.mark.parametrize(("case", "arrays"), [("sgd_momentum", 1), ("adam", 2), ("adadelta", 2)])
def test_caffes_own_states_are_read(shared: Path, case: str, arrays: int) -> None:
    path = shared / "golden" / "files" / f"{case}_iter_12.solverstate"
    found = read_state(path, BLOBS, arrays)
    assert found.iteration == 12
    assert [tuple(h[0].shape) for h in found.histories] == [shape for _, shape in BLOBS]
    assert learned_net(found, path).name == f"{case}_iter_12.caffemodel"
    assert read_head(path).seed is None


def test_momentum_in_caffes_state_explains_its_last_step(shared: Path) -> None:
    found = read_state(shared / "golden" / "files" / "sgd_momentum_iter_12.solverstate", BLOBS, 1)
    steps = np.load(shared / "golden" / "solvers" / "sgd_momentum.npz")
    moved = steps["step10:ip1:0"] - steps["step11:ip1:0"]
    np.testing.assert_allclose(found.histories[0][0], moved, rtol=1e-3, atol=1e-6)


def test_another_solver_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.solverstate"
    write_state(path, state(1))
    with pytest.raises(SnapshotError, match="4 history blobs; this net and solver type need 8"):
        read_state(path, BLOBS, 2)


def test_another_net_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.solverstate"
    write_state(path, state(1))
    with pytest.raises(SnapshotError, match=r"history of 'ip1\.0' has shape \(6, 5\)"):
        read_state(path, [("ip1.0", (5, 6)), *BLOBS[1:]], 1)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    path = tmp_path / "s.solverstate"
    write_state(path, state(1))
    with pytest.raises(SnapshotError, match="there is no m_iter_12"):
        learned_net(state(1), path)
    beside = tmp_path / "s.caffemodel"
    # the message names each path once
    with pytest.raises(SnapshotError, match=rf"there is no {re.escape(str(beside))}$"):
        learned_net(replace(state(1), model=str(beside)), path)


@pytest.mark.parametrize("ending", [".solverstate", ".solverstate.h5"])
def test_a_snapshot_in_a_folder_whose_name_is_not_utf_8(tmp_path: Path, ending: str) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    path = folder / f"\udce9_iter_12{ending}"
    model = folder / path.name.replace("solverstate", "caffemodel")
    model.touch()
    write_state(path, replace(state(1), model=str(model)))
    assert learned_net(read_head(path), path) == model
    seal(path, model)
    assert (find_damage(path), sealed_files(path)) == (None, (model, path))


def test_no_state_at_all(tmp_path: Path) -> None:
    path = tmp_path / "s.solverstate"
    path.write_bytes(b"")
    with pytest.raises(SnapshotError, match="is not a solver state: it has no iteration"):
        read_state(path, BLOBS, 1)
    with pytest.raises(SnapshotError, match="--weights"):  # before a job starts
        read_head(path)
