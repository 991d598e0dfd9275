"""The six solvers by name, and the choice among them."""

from __future__ import annotations

import os
from pathlib import Path

from poseidon.proto.definition import read_solver
from poseidon.pycaffe.net import FileMissing
from poseidon.pycaffe.solver import Solver
from poseidon.solvers.settings import solver_settings
from ps_server import RuleKind


class SGDSolver(Solver):
    """Stochastic gradient descent with momentum."""

    KIND = RuleKind.SGD


class NesterovSolver(Solver):
    """Nesterov's accelerated gradient."""

    KIND = RuleKind.NESTEROV


class AdaGradSolver(Solver):
    """AdaGrad (Duchi et al., 2011)."""

    KIND = RuleKind.ADAGRAD


class RMSPropSolver(Solver):
    """RMSProp (Tieleman and Hinton, 2012)."""

    KIND = RuleKind.RMSPROP


class AdaDeltaSolver(Solver):
    """AdaDelta (Zeiler, 2012)."""

    KIND = RuleKind.ADADELTA


class AdamSolver(Solver):
    """Adam (Kingma and Ba, 2015)."""

    KIND = RuleKind.ADAM


_CLASSES: dict[RuleKind, type[Solver]] = {
    RuleKind.SGD: SGDSolver,
    RuleKind.NESTEROV: NesterovSolver,
    RuleKind.ADAGRAD: AdaGradSolver,
    RuleKind.RMSPROP: RMSPropSolver,
    RuleKind.ADADELTA: AdaDeltaSolver,
    RuleKind.ADAM: AdamSolver,
}


def get_solver(solver_file: str | os.PathLike[str]) -> Solver:
    """Return the solver that a file describes, of the class of its type.

    Raises:
        DefinitionError: a mistake in the solver or its nets.
    """
    path = Path(solver_file)
    if not path.is_file():
        raise FileMissing("there is no such solver definition", source=str(path))
    return _CLASSES[solver_settings(read_solver(path), endless=True).base_rule.kind](path)
