"""What is told before a process starts; the sentences are held through the command line in test_broken_inputs.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.engine.preflight import check_nets, check_snapshot_prefix, obstacle_to
from poseidon.errors import DefinitionError
from poseidon.proto.definition import read_solver
from poseidon.solvers.settings import solver_settings
from tests.support.training import write_definitions


def test_a_sound_solver_passes_without_its_data(tmp_path: Path) -> None:
    solver = read_solver(write_definitions(tmp_path, batch=4, extra="max_iter: 3"))
    assert check_nets(solver, solver_settings(solver)).param.name == "small"
    check_snapshot_prefix(solver)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.prototxt", "solver.prototxt"]


def test_no_loss_matters_only_to_training(tmp_path: Path) -> None:
    for max_iter in (0, 3):
        solver = read_solver(write_definitions(tmp_path, batch=4, extra=f"max_iter: {max_iter}"))
        net = tmp_path / "net.prototxt"
        net.write_text(net.read_text().replace('"SoftmaxWithLoss"', '"Accuracy"'))
        if max_iter:
            with pytest.raises(DefinitionError, match="no loss to train on"):
                check_nets(solver, solver_settings(solver))
        else:
            check_nets(solver, solver_settings(solver))


def test_obstacles(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    assert obstacle_to(tmp_path) is None
    assert obstacle_to(tmp_path / "new" / "deep") is None
    assert obstacle_to(tmp_path / "file" / "deep") == f"{tmp_path}/file is not a folder"
    assert obstacle_to(tmp_path / "nowhere") == f"{tmp_path}/nowhere is not a folder"
    assert list(tmp_path.glob("new")) == []
