"""Learning-rate policies: Caffe's formulas, as pure functions of the iteration.

Symbols: r base_lr, g gamma, p power, s stepsize, t iteration (0-based), T max_iter.

    fixed       r
    step        r g^floor(t / s)
    exp         r g^t
    inv         r (1 + g t)^-p
    multistep   r g^k, k the number of stepvalues that t has reached, at most one an iteration
    poly        r (1 - t / T)^p
    sigmoid     r / (1 + exp(-g (t - s)))
"""

from __future__ import annotations

import math
from collections.abc import Callable

from poseidon.caffe.proto.caffe_pb2 import SolverParameter
from poseidon.caffe.proto.definition import SolverDefinition
from poseidon.errors import nearest

Policy = Callable[[SolverParameter, int], float]
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


def _power(base: float, exponent: float) -> float:
    """Compute a power as C's pow: inf on overflow and for 0 to a negative
    power, nan for a root of a negative number.
    """
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return math.copysign(math.inf, base) if exponent % 2 == 1 else math.inf
    except ValueError:
        return math.inf if base == 0 else math.nan


def _step(solver: SolverParameter, t: int) -> float:
    return float(solver.base_lr * _power(solver.gamma, t // solver.stepsize))


def _multistep(solver: SolverParameter, t: int) -> float:
    return float(solver.base_lr * _power(solver.gamma, _values_reached(solver, t)))


def _values_reached(solver: SolverParameter, t: int) -> int:
    """Return how many stepvalues iteration t has reached. Of equal ones each iteration counts one."""
    reached, last = 0, -1
    for value in solver.stepvalue:
        last = max(value, last + 1)
        reached += t >= last
    return reached


def _sigmoid(solver: SolverParameter, t: int) -> float:
    # Only exp of negative numbers, so that late iterations do not overflow.
    x = solver.gamma * (t - solver.stepsize)
    z = math.exp(-abs(x))
    return float(solver.base_lr * (1 / (1 + z) if x >= 0 else z / (1 + z)))


def _poly(solver: SolverParameter, t: int) -> float:
    remaining = max(0.0, 1 - t / solver.max_iter) if solver.max_iter else math.nan
    return float(solver.base_lr * _power(remaining, solver.power))


POLICIES: dict[str, Policy] = {
    "fixed": lambda solver, t: solver.base_lr,
    "step": _step,
    "exp": lambda solver, t: float(solver.base_lr * _power(solver.gamma, t)),
    "inv": lambda solver, t: float(solver.base_lr * _power(1 + solver.gamma * t, -solver.power)),
    "multistep": _multistep,
    "poly": _poly,
    "sigmoid": _sigmoid,
}

# The fields that a policy needs. Others have Caffe's defaults: a missing `power` or base_lr is 0.
_NEEDS: dict[str, tuple[str, ...]] = {
    "step": ("stepsize",),
    "sigmoid": ("stepsize",),
}
_USES_GAMMA = ("step", "exp", "inv", "multistep", "sigmoid")


def rate_policy(solver: SolverDefinition) -> Callable[[int], float]:
    """Return the learning rate as a function of the iteration.

    Returns:
        a function of the 0-based iteration.

    Raises:
        DefinitionError: the policy is unknown, or a field is missing or out of range.
    """
    param = solver.param
    policy = POLICIES.get(param.lr_policy)
    if policy is None:
        near = nearest(param.lr_policy, POLICIES)
        hint = f"did you mean '{near}'?" if near else f"expected one of {', '.join(POLICIES)}"
        raise solver.error("lr_policy", f"unknown policy '{param.lr_policy}'; {hint}")
    for name in _NEEDS.get(param.lr_policy, ()):
        if not param.HasField(name):
            raise solver.error("lr_policy", f"'{param.lr_policy}' needs {name}, which is missing")
    if param.lr_policy == "step" and param.stepsize <= 0:
        raise solver.error("stepsize", f"expected a positive number, found {param.stepsize}")
    return lambda iteration: _limited_to_float32(policy(param, iteration))


def rate_oddities(param: SolverParameter) -> list[str]:
    """Return a sentence for each field of the rate that Caffe takes, though it is hardly meant."""
    found = []
    if not param.HasField("base_lr"):
        found.append("base_lr is missing; as in Caffe, the learning rate is 0")
    if param.lr_policy in _USES_GAMMA and not param.HasField("gamma"):
        found.append(
            f"gamma is missing, which lr_policy '{param.lr_policy}' reads; as in Caffe, it is 0"
        )
    if param.lr_policy == "multistep" and list(param.stepvalue) != sorted(param.stepvalue):
        found.append(
            "the stepvalues do not ascend; as in Caffe, they are reached in the order of the file, "
            "at most one an iteration"
        )
    return found


def current_step(solver: SolverParameter, iterations: int) -> int:
    """Return what Caffe's solverstate has as current_step: the number of steps that the last
    rate has taken.

    Args:
        solver: the definition.
        iterations: the number of iterations that have ended. The last rate is the rate of iteration
            `iterations` - 1.
    """
    last = iterations - 1
    if last < 0:
        return 0
    if solver.lr_policy == "step":
        return last // solver.stepsize
    if solver.lr_policy == "multistep":
        return _values_reached(solver, last)
    return 0


def _limited_to_float32(rate: float) -> float:
    """Return the rate, or infinity if it exceeds float32, as in Caffe."""
    return math.copysign(math.inf, rate) if abs(rate) > LARGEST_FLOAT32 else rate
