"""Upgrade of a solver's enum `solver_type` to the string `type`."""

from __future__ import annotations

from poseidon.proto.caffe_pb2 import SolverParameter
from poseidon.proto.upgrade.errors import UpgradeError

_NAMES = {
    SolverParameter.SGD: "SGD",
    SolverParameter.NESTEROV: "Nesterov",
    SolverParameter.ADAGRAD: "AdaGrad",
    SolverParameter.RMSPROP: "RMSProp",
    SolverParameter.ADADELTA: "AdaDelta",
    SolverParameter.ADAM: "Adam",
}


def has_solver_type(solver: SolverParameter) -> bool:
    """Return whether the solver has the old enum."""
    return solver.HasField("solver_type")


def to_type(solver: SolverParameter) -> SolverParameter:
    """Return the solver with its type as a string.

    Raises:
        UpgradeError: both fields are set.
    """
    if solver.HasField("type"):
        raise UpgradeError("solver_type and type are both set; expected type alone")
    upgraded = SolverParameter()
    upgraded.CopyFrom(solver)
    upgraded.type = _NAMES[solver.solver_type]
    upgraded.ClearField("solver_type")
    return upgraded
