"""Update rules that the shards apply, as values with torch's arguments.

Law: the formulas are Caffe's (`ps_server/rules.py`). A class names each difference from
torch.optim; without one they are the same up to rounding. Weight decay is added to the gradient, as
torch.optim does but for AdamW.

Symbols: w value, g gradient, r rate, t number of the step from 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from poseidon.errors import UsageError
from poseidon.exchange.options import DEFAULT_OPTIONS
from ps_server import Rule, RuleKind, SpecError

Rate = float | Callable[[int], float]
"""A rate, or a function from the number of finished steps to a rate, the same on every worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters with factors of their own for rate and decay.

    Args:
        names: a pattern of their names in the module, `*.bias` or `head.*` (`*`, `?` and `[...]`).
        lr_factor: multiplies the rate; 0 or more.
        weight_decay_factor: multiplies the weight decay; 0 or more.
    """

    names: str
    lr_factor: float = 1.0
    weight_decay_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("lr_factor", "weight_decay_factor"):
            _check(f"{name} of the group '{self.names}'", getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """The common arguments of all rules.

    Args:
        lr: the rate, or a function from the number of finished steps to it.
        weight_decay: multiplies w, which is added to the gradient.
        groups: parameters with factors of their own; the first group whose pattern matches applies.
    """

    lr: Rate
    weight_decay: float = 0.0
    groups: Sequence[ParameterGroup] = ()

    def __post_init__(self) -> None:
        if not callable(self.lr):
            _check("lr", self.lr)
        _check("weight_decay", self.weight_decay)
        self.server_rule("")

    def rate(self, step: int) -> float:
        """Return the rate of a step, counted from 0.

        Raises:
            UsageError: the rule's function does not return a number of 0 or more.
        """
        if not callable(self.lr):
            return float(self.lr)
        rate = self.lr(step)
        _check(f"lr({step})", rate)
        return float(rate)

    def server_rule(self, name: str) -> Rule:
        """Return the shards' rule for the parameter of a name.

        Raises:
            UsageError: an argument is out of its range.
        """
        group = next(
            (g for g in self.groups if fnmatchcase(name, g.names)), ParameterGroup(names="*")
        )
        decay = float(self.weight_decay * group.weight_decay_factor)
        try:
            return self._rule(decay=decay, rate_factor=float(group.lr_factor))
        except SpecError as error:
            raise UsageError(f"{type(self).__name__}: {error}") from error

    def check_groups(self, names: Sequence[str]) -> None:
        """Refuse a group that matches no parameter.

        Raises:
            UsageError: the text names the group.
        """
        for group in self.groups:
            if not any(fnmatchcase(name, group.names) for name in names):
                raise UsageError(
                    f"no parameter of the module fits the group '{group.names}'; there are "
                    f"{', '.join(names)}"
                )

    def _rule(self, *, decay: float, rate_factor: float) -> Rule:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """The outer rule of local steps: m <- b m + g; w <- w - lr (g + b m), or w - lr m without
    Nesterov's momentum.

    g is the mean over the workers of what a round has subtracted from w. The
    defaults are DiLoCo's (Douillard et al., 2023).

    Args:
        lr: the rate; above 0.
        momentum: b; 0 <= b < 1.
        nesterov: Nesterov's momentum.
        fragments: parts of the parameters that are exchanged at different steps of a round; 1 to
            its steps.
        delay: local steps that are made while a part travels; 0 or more, less than the steps of a
            round.
        mix: the weight of a worker's own value when the common one comes after a delay; 0 <= mix <
            1.
    """

    lr: float = DEFAULT_OPTIONS.outer_lr
    momentum: float = DEFAULT_OPTIONS.outer_momentum
    nesterov: bool = DEFAULT_OPTIONS.outer_nesterov
    fragments: int = DEFAULT_OPTIONS.sync_fragments
    delay: int = DEFAULT_OPTIONS.sync_delay
    mix: float = DEFAULT_OPTIONS.sync_mix

    def __post_init__(self) -> None:
        _check("lr of Outer", self.lr)
        _check("momentum of Outer", self.momentum)
        if not self.lr or self.momentum >= 1:
            raise UsageError(
                f"Outer has lr {self.lr} and momentum {self.momentum}; expected lr above 0 and "
                "momentum below 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(UpdateRule):
    """h <- m h + r g; w <- w - h.

    torch.optim.SGD multiplies by the rate after the sum. The same while the rate stays; after a
    change Caffe's history still moves with the old rate.

    Args:
        momentum: m; 0 <= m < 1.
    """

    momentum: float = 0.0

    def _rule(self, *, decay: float, rate_factor: float) -> Rule:
        return Rule(
            kind=RuleKind.SGD, momentum=float(self.momentum), decay=decay, rate_factor=rate_factor
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Nesterov(UpdateRule):
    """torch.optim.SGD(nesterov=True), with the difference of `SGD` when the rate changes.

    Args:
        momentum: m; 0 <= m < 1.
    """

    momentum: float = 0.9

    def _rule(self, *, decay: float, rate_factor: float) -> Rule:
        return Rule(
            kind=RuleKind.NESTEROV,
            momentum=float(self.momentum),
            decay=decay,
            rate_factor=rate_factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaGrad(UpdateRule):
    """torch.optim.Adagrad, without `lr_decay` and `initial_accumulator_value`.

    Args:
        eps: added to the root.
    """

    eps: float = 1e-10

    def _rule(self, *, decay: float, rate_factor: float) -> Rule:
        return Rule(
            kind=RuleKind.ADAGRAD, delta=float(self.eps), decay=decay, rate_factor=rate_factor
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RMSProp(UpdateRule):
    """torch.optim.RMSprop, without `momentum` and `centered`.

    Args:
        alpha: how much of the average of squares a step keeps; 0 <= alpha < 1.
        eps: added to the root.
    """

    alpha: float = 0.99
    eps: float = 1e-8

    def _rule(self, *, decay: float, rate_factor: float) -> Rule:
        return Rule(
            kind=RuleKind.RMSPROP,
            rms_decay=float(self.alpha),
            delta=float(self.eps),
            decay=decay,
            rate_factor=rate_factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaDelta(UpdateRule):
    """torch.optim.Adadelta.

    Args:
        rho: how much of both averages a step keeps; 0 <= rho < 1.
        eps: added below both roots.
    """

    lr: Rate = 1.0
    rho: float = 0.9
    eps: float = 1e-6

    def _rule(self, *, decay: float, rate_factor: float) -> Rule:
        return Rule(
            kind=RuleKind.ADADELTA,
            momentum=float(self.rho),
            delta=float(self.eps),
            decay=decay,
            rate_factor=rate_factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(UpdateRule):
    """w <- w - r sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps).

    torch.optim.Adam adds eps to the corrected root, so there it weighs less in the first steps: by
    the factor sqrt(1 - b2^t), 0.03 in the first step and 0.8 after a thousand with the usual b2.
    Where eps is small beside the roots the two agree.

    Args:
        betas: b1 and b2; 0 <= b < 1.
        eps: added to the root.
    """

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def _rule(self, *, decay: float, rate_factor: float) -> Rule:
        return Rule(
            kind=RuleKind.ADAM,
            momentum=float(self.betas[0]),
            momentum2=float(self.betas[1]),
            delta=float(self.eps),
            decay=decay,
            rate_factor=rate_factor,
        )


def _check(name: str, value: object) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise UsageError(f"{name} is {value!r}; expected a number, 0 or more")
