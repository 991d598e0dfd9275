"""The enum `solver_type` of a solver, to the string `type`."""

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
    """Whether the solver names its rule by the old enum."""
    return solver.HasField("solver_type")


def to_type(solver: SolverParameter) -> SolverParameter:
    """The solver with its rule as a string.

    Raises:
        UpgradeError: it gives both forms.
    """
    if solver.HasField("type"):
        raise UpgradeError("solver_type and type are both given; expected type alone")
    upgraded = SolverParameter()
    upgraded.CopyFrom(solver)
    upgraded.type = _NAMES[solver.solver_type]
    upgraded.ClearField("solver_type")
    return upgraded
