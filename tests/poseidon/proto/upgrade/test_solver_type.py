"""solver_type becomes type."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.errors import DefinitionError
from poseidon.proto.caffe_pb2 import SolverParameter
from poseidon.proto.definition import read_solver
from poseidon.proto.text import parse
from poseidon.proto.upgrade.driver import upgrade_solver


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", "SGD"),
        ("solver_type: SGD", "SGD"),
        ("solver_type: NESTEROV", "Nesterov"),
        ("solver_type: ADAGRAD", "AdaGrad"),
        ("solver_type: RMSPROP", "RMSProp"),
        ("solver_type: ADADELTA", "AdaDelta"),
        ("solver_type: ADAM", "Adam"),
        ("solver_type: 5", "Adam"),
        ('type: "Nesterov"', "Nesterov"),
    ],
)
def test_type(text: str, expected: str) -> None:
    upgraded = upgrade_solver(parse(text, SolverParameter(), source=""))
    assert upgraded.type == expected
    assert not upgraded.HasField("solver_type")


def test_both_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "solver.prototxt"
    path.write_text('solver_type: ADAM\ntype: "SGD"')
    with pytest.raises(DefinitionError, match="solver_type and type are both set"):
        read_solver(path)
