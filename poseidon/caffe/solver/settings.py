"""The validated settings of a solver definition: the update rule, the parameters of the training loop,
and the learning rate of each iteration.

Caffe's rate policies, as pure functions of the iteration. Symbols: r base_lr, g gamma, p power, s
stepsize, t iteration (0-based), T max_iter.

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
from dataclasses import dataclass, replace

from poseidon.caffe.proto.caffe_pb2 import SolverParameter
from poseidon.caffe.proto.definition import SolverDefinition
from poseidon.errors import unknown
from ps_server import Regularization, Rule, RuleKind, SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverSettings:
    """The validated settings of a solver.

    Attributes:
        param: has what is used as it stands.
        max_iter: the number of iterations; >= 0.
        iter_size: the number of forward and backward passes whose gradients are accumulated for an
            update; >= 1.
        clip: the limit of the L2 norm of all gradients; None: no limit.
        rate: the learning rate as a function of the 0-based iteration.
        base_rule: the update rule without the multipliers of a tensor.
        display: the number of iterations between displayed losses; 0: never.
        test_interval: the number of iterations between tests; 0: never.
        snapshot: the number of iterations between snapshots; 0: never.
        random_seed: the seed; None: a different seed in each run.
        ap_version: the average precision that tests compute of detections, one of
            AP_VERSIONS; None: outputs are averaged.
    """

    param: SolverParameter
    max_iter: int
    iter_size: int
    clip: float | None
    rate: Callable[[int], float]
    base_rule: Rule
    display: int
    test_interval: int
    snapshot: int
    random_seed: int | None
    ap_version: str | None = None

    def rule(self, lr_mult: float, decay_mult: float) -> Rule:
        """Return the update rule of a tensor with these multipliers."""
        base = self.base_rule
        return replace(base, decay=base.decay * decay_mult, rate_factor=lr_mult)

    def shows(self, iteration: int) -> bool:
        """Return whether the loss of an iteration is displayed."""
        return bool(self.display) and iteration % self.display == 0

    def saves(self, iteration: int) -> bool:
        """Return whether a snapshot is written when so many iterations are finished."""
        return bool(self.snapshot) and iteration % self.snapshot == 0

    def saves_at_end(self, iteration: int) -> bool:
        """Return whether a run that ends after so many iterations writes one more snapshot, as
        Caffe does.
        """
        return self.param.snapshot_after_train and not self.saves(iteration)

    def tests(self, iteration: int, *, first: bool) -> bool:
        """Return whether test nets are scored when so many iterations are finished; before the
        first one if `first` says so.
        """
        due = bool(self.test_interval) and iteration % self.test_interval == 0
        return due and (iteration > 0 or first)


EVAL_TYPES = ("classification", "detection")
AP_VERSIONS = ("11point", "MaxIntegral", "Integral")
"""SSD's versions of the average precision."""
_INTERVALS = ("display", "test_interval", "snapshot")
_REGULARIZATIONS = frozenset(kind.value for kind in Regularization)


def solver_settings(solver: SolverDefinition) -> SolverSettings:
    """Validate a solver definition. What Caffe takes is legal; see `oddities`.

    Raises:
        DefinitionError: a value is out of range or not legal for the solver's type.
    """
    param = solver.param
    for field, value in param.ListFields():
        if isinstance(value, float) and not math.isfinite(value):
            raise solver.error(field.name, f"expected a finite number, found {value}")
    for name in ("iter_size", "average_loss"):
        if getattr(param, name) < 1:
            raise solver.error(name, f"expected 1 or more, found {getattr(param, name)}")
    for name, legal in (("eval_type", EVAL_TYPES), ("ap_version", AP_VERSIONS)):
        if getattr(param, name) not in legal:
            raise solver.error(name, f"is '{getattr(param, name)}', expected {', '.join(legal)}")
    return SolverSettings(
        param=param,
        max_iter=max(param.max_iter, 0),
        iter_size=param.iter_size,
        clip=param.clip_gradients if param.clip_gradients > 0 else None,
        rate=rate_policy(solver),
        base_rule=_rule(solver),
        display=abs(param.display),
        test_interval=abs(param.test_interval),
        snapshot=abs(param.snapshot),
        random_seed=param.random_seed if param.random_seed >= 0 else None,
        ap_version=param.ap_version if param.eval_type == "detection" else None,
    )


def oddities(solver: SolverDefinition, *, endless: bool = False) -> list[str]:
    """Return a sentence for each setting that Caffe takes, though it is hardly meant.

    Args:
        endless: the caller decides the number of iterations.
    """
    param, found = solver.param, rate_oddities(solver.param)
    if not endless and (not param.HasField("max_iter") or param.max_iter < 0):
        number = f"is {param.max_iter}" if param.HasField("max_iter") else "is missing"
        found.insert(0, f"max_iter {number}; as in Caffe, the job makes no iteration")
    for name in _INTERVALS:
        if (value := getattr(param, name)) < 0:
            found.append(f"{name} is {value}; as in Caffe, it acts as {-value}")
    if param.test_interval and not param.test_iter:
        found.append(
            "test_interval is set but test_iter is missing; as in Caffe, nothing is tested"
        )
    if param.regularization_type not in _REGULARIZATIONS and not param.weight_decay:
        found.append(
            f"regularization_type is '{param.regularization_type}', which does not exist; as in "
            "Caffe, it has no effect without weight_decay"
        )
    return [f"{solver.source}: {sentence}" for sentence in found]


def _rule(solver: SolverDefinition) -> Rule:
    param = solver.param
    kind = _kind(solver)
    if kind in (RuleKind.ADAGRAD, RuleKind.RMSPROP) and param.momentum:
        # Caffe rejects these, too: the formula has no momentum.
        raise solver.error(
            "momentum", f"{kind.value} has no momentum; expected 0, found {param.momentum:g}"
        )
    try:
        return Rule(
            kind=kind,
            momentum=param.momentum,
            momentum2=param.momentum2,
            delta=param.delta,
            rms_decay=param.rms_decay,
            decay=param.weight_decay,
            regularization=_regularization(solver),
        )
    except SpecError as error:
        name = str(error).split(" ", 1)[0]
        raise solver.error(name, str(error)) from error


KINDS: dict[str, RuleKind] = {
    kind.value: kind
    for kind in (
        RuleKind.SGD,
        RuleKind.NESTEROV,
        RuleKind.ADAGRAD,
        RuleKind.RMSPROP,
        RuleKind.ADADELTA,
        RuleKind.ADAM,
    )
}
"""Caffe's solver types."""


def _kind(solver: SolverDefinition) -> RuleKind:
    name = _type_name(solver.param)
    try:
        return KINDS[name]
    except KeyError as error:
        raise solver.error("type", unknown("solver type", name, KINDS)) from error


def _type_name(param: SolverParameter) -> str:
    """Return the type, from the string `type` or the old enum solver_type."""
    if param.HasField("solver_type") and not param.HasField("type"):
        old = SolverParameter.SolverType.Name(param.solver_type)
        return {name.upper(): name for name in KINDS}[old]
    return param.type


def _regularization(solver: SolverDefinition) -> Regularization:
    if not solver.param.weight_decay and solver.param.regularization_type not in _REGULARIZATIONS:
        return Regularization.L2
    try:
        return Regularization(solver.param.regularization_type)
    except ValueError as error:
        raise solver.error(
            "regularization_type",
            f"expected 'L1' or 'L2', found '{solver.param.regularization_type}'",
        ) from error


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
    "multistep": lambda solver, t: float(
        solver.base_lr * _power(solver.gamma, _values_reached(solver, t))
    ),
    "poly": _poly,
    "sigmoid": _sigmoid,
}

# Their fields besides stepsize have Caffe's defaults: a missing `power` or base_lr is 0.
_NEED_STEPSIZE = ("step", "sigmoid")
_USES_GAMMA = ("step", "exp", "inv", "multistep", "sigmoid")
_USES_POWER = ("inv", "poly")


def rate_policy(solver: SolverDefinition) -> Callable[[int], float]:
    """Return the learning rate as a function of the 0-based iteration.

    Raises:
        DefinitionError: the policy is unknown, or a field is missing or out of range.
    """
    param = solver.param
    policy = POLICIES.get(param.lr_policy)
    if policy is None:
        raise solver.error("lr_policy", unknown("policy", param.lr_policy, POLICIES))
    if param.lr_policy in _NEED_STEPSIZE and not param.HasField("stepsize"):
        raise solver.error("lr_policy", f"'{param.lr_policy}' needs stepsize, which is missing")
    if param.lr_policy == "step" and param.stepsize <= 0:
        raise solver.error("stepsize", f"expected a positive number, found {param.stepsize}")
    return lambda iteration: _limited_to_float32(policy(param, iteration))


def rate_oddities(param: SolverParameter) -> list[str]:
    """Return a sentence for each field of the rate that Caffe takes, though it is hardly meant."""
    found = []
    if not param.HasField("base_lr"):
        found.append("base_lr is missing; as in Caffe, the learning rate is 0")
    for name, policies in (("gamma", _USES_GAMMA), ("power", _USES_POWER)):
        if param.lr_policy in policies and not param.HasField(name):
            found.append(
                f"{name} is missing, which lr_policy '{param.lr_policy}' reads; as in Caffe, it is "
                "0"
            )
    if param.lr_policy == "multistep" and not param.stepvalue:
        found.append(
            "stepvalue is missing, which lr_policy 'multistep' reads; as in Caffe, the learning "
            "rate does not change"
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
