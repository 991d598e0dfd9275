"""Update rules that the shards apply, as values with torch's arguments and torch's meaning.

Law: a rule computes what the torch.optim optimizer of its name computes (`ps_server/rules.py`):
1,000 steps differ by at most 1e-6 of the largest value. Lion, which torch.optim lacks, follows its
paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Protocol

from poseidon.errors import UsageError
from poseidon.torch.options import check_number
from ps_server import NewtonSchulz, Rule, RuleKind, SpecError

Rate = float | Callable[[int], float]
"""A rate, or a function from the number of finished steps to a rate, the same on every worker."""


class ShardRules(Protocol):
    """The rules of a module's parameters: an `UpdateRule`, or the rules of optimizers."""

    @property
    def label(self) -> str:
        """Its name in messages and checkpoints."""

    def server_rule(self, name: str, shape: Sequence[int]) -> Rule:
        """Return the shards' rule for the parameter of a name and a shape.

        Raises:
            UsageError: an argument is out of its range, or the shape is not one of the rule's.
        """

    def rate_index(self, name: str, shape: Sequence[int]) -> int:
        """Return which of `rates` a parameter follows."""

    def rates(self, step: int) -> tuple[float, ...]:
        """Return the rates of a step, counted from 0.

        Raises:
            UsageError: one is not a number of 0 or more.
        """

    def check_groups(self, names: Sequence[str]) -> None:
        """Refuse a group that matches no parameter.

        Raises:
            UsageError: the text names the group.
        """


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
            check_number(f"{name} of the group '{self.names}'", getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """The common arguments of all rules, which are `ShardRules`.

    Args:
        lr: the rate, or a function from the number of finished steps to it.
        weight_decay: multiplies the values, which are added to the gradient. AdamW, Lion and Muon
            subtract them, times the rate, from the values themselves.
        groups: parameters with factors of their own; the first group whose pattern matches applies.
    """

    lr: Rate
    weight_decay: float = 0.0
    groups: Sequence[ParameterGroup] = ()

    def __post_init__(self) -> None:
        if not callable(self.lr):
            check_number("lr", self.lr)
        check_number("weight_decay", self.weight_decay)
        self.server_rule("", (1, 1))

    @property
    def label(self) -> str:
        return f"poseidon.{type(self).__name__}"

    def rates(self, step: int) -> tuple[float, ...]:
        return (self.rate(step),)

    def rate_index(self, name: str, shape: Sequence[int]) -> int:
        return 0

    def rate(self, step: int) -> float:
        """Return the rule's own rate in a step, counted from 0.

        Raises:
            UsageError: the rule's function does not return a number of 0 or more.
        """
        if not callable(self.lr):
            return float(self.lr)
        rate = self.lr(step)
        check_number(f"lr({step})", rate)
        return float(rate)

    def server_rule(self, name: str, shape: Sequence[int]) -> Rule:
        group = next(
            (g for g in self.groups if fnmatchcase(name, g.names)), ParameterGroup(names="*")
        )
        decay = float(self.weight_decay * group.weight_decay_factor)
        try:
            rule = self._rule(name, shape)
            return replace(rule, decay=decay, rate_factor=float(group.lr_factor))
        except SpecError as error:
            raise UsageError(f"{type(self).__name__}: {error}") from error

    def check_groups(self, names: Sequence[str]) -> None:
        for group in self.groups:
            if not any(fnmatchcase(name, group.names) for name in names):
                raise UsageError(
                    f"the group '{group.names}' matches no parameter of the module; there are "
                    f"{', '.join(names)}"
                )

    def _rule(self, name: str, shape: Sequence[int]) -> Rule:
        """Return the rule of a parameter, without what all rules have in common."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(UpdateRule):
    """torch.optim.SGD.

    Args:
        momentum: of the history; 0 <= momentum < 1.
        dampening: lessens what a gradient adds to the history.
        nesterov: Nesterov's momentum; needs momentum, and no dampening.
    """

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def _rule(self, name: str, shape: Sequence[int]) -> Rule:
        if self.nesterov and (not self.momentum or self.dampening):
            raise UsageError(
                f"SGD has nesterov=True with momentum {self.momentum} and dampening "
                f"{self.dampening}; expected momentum above 0 and no dampening"
            )
        return Rule(
            kind=RuleKind.TORCH_SGD,
            momentum=float(self.momentum),
            dampening=float(self.dampening),
            nesterov=bool(self.nesterov),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaGrad(UpdateRule):
    """torch.optim.Adagrad, without `lr_decay` and `initial_accumulator_value`.

    Args:
        eps: added to the root.
    """

    eps: float = 1e-10

    def _rule(self, name: str, shape: Sequence[int]) -> Rule:
        return Rule(kind=RuleKind.ADAGRAD, delta=float(self.eps))


@dataclass(frozen=True, slots=True, kw_only=True)
class RMSProp(UpdateRule):
    """torch.optim.RMSprop, without `momentum` and `centered`.

    Args:
        alpha: how much of the average of squares a step keeps; 0 <= alpha < 1.
        eps: added to the root.
    """

    alpha: float = 0.99
    eps: float = 1e-8

    def _rule(self, name: str, shape: Sequence[int]) -> Rule:
        return Rule(kind=RuleKind.RMSPROP, rms_decay=float(self.alpha), delta=float(self.eps))


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

    def _rule(self, name: str, shape: Sequence[int]) -> Rule:
        return Rule(kind=RuleKind.ADADELTA, momentum=float(self.rho), delta=float(self.eps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(UpdateRule):
    """torch.optim.Adam, without `amsgrad`.

    Args:
        betas: how much of both moments a step keeps; 0 <= beta < 1.
        eps: added to the root.
    """

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def _rule(self, name: str, shape: Sequence[int]) -> Rule:
        return _of_moments(RuleKind.TORCH_ADAM, self.betas, self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Adam):
    """torch.optim.AdamW, without `amsgrad`, with the arguments of `Adam`."""

    weight_decay: float = 1e-2

    def _rule(self, name: str, shape: Sequence[int]) -> Rule:
        return _of_moments(RuleKind.ADAMW, self.betas, self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion(UpdateRule):
    """Lion: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2.

    Args:
        betas: the weight of the history in a step, and how much of it the step keeps; 0 <= beta <
            1.
    """

    lr: Rate = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)

    def _rule(self, name: str, shape: Sequence[int]) -> Rule:
        return _of_moments(RuleKind.LION, self.betas, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon(UpdateRule):
    """torch.optim.Muon for matrices, and another rule for all other parameters.

    A matrix is whole on one shard, where it is orthogonalized by one thread in bfloat16. The bits
    of its products depend on the shard's processor.

    Args:
        momentum: of the history; 0 <= momentum < 1.
        nesterov: Nesterov's momentum.
        ns_coefficients, ns_steps: of the Newton-Schulz iteration.
        eps: least norm that a matrix is divided by.
        adjust_lr_fn: `original` or None: the rate times sqrt(max(1, rows / columns));
            `match_rms_adamw`: times 0.2 sqrt(max(rows, columns)).
        others: the rule of parameters other than matrices, at a rate of its own. None: there are
            no such parameters.
        other_names: patterns of the names of matrices that follow `others` too, such as `head.*`.
    """

    lr: Rate = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None
    others: UpdateRule | None = None
    other_names: Sequence[str] = ()

    def rates(self, step: int) -> tuple[float, ...]:
        others = () if self.others is None else self.others.rates(step)
        return self.rate(step), *others

    def rate_index(self, name: str, shape: Sequence[int]) -> int:
        if self.others is None or not self._is_for_others(name, shape):
            return 0
        return 1 + self.others.rate_index(name, shape)

    def server_rule(self, name: str, shape: Sequence[int]) -> Rule:
        if self.others is not None and self._is_for_others(name, shape):
            return self.others.server_rule(name, shape)
        return UpdateRule.server_rule(self, name, shape)

    def check_groups(self, names: Sequence[str]) -> None:
        UpdateRule.check_groups(self, names)
        if self.others is not None:
            self.others.check_groups(names)

    def _is_for_others(self, name: str, shape: Sequence[int]) -> bool:
        return len(shape) != 2 or any(fnmatchcase(name, pattern) for pattern in self.other_names)

    def _rule(self, name: str, shape: Sequence[int]) -> Rule:
        if len(shape) != 2:
            raise UsageError(
                f"Muon is for matrices, but '{name}' has the shape {tuple(shape)}; give Muon "
                "others=poseidon.AdamW(...), or use a torch.optim optimizer"
            )
        a, b, c = map(float, self.ns_coefficients)
        return Rule(
            kind=RuleKind.MUON,
            momentum=float(self.momentum),
            nesterov=bool(self.nesterov),
            delta=float(self.eps),
            matrix=NewtonSchulz(
                columns=shape[1],
                coefficients=(a, b, c),
                steps=self.ns_steps,
                rate_factor=_adjustment(self.adjust_lr_fn, *shape),
            ),
        )


def _adjustment(name: str | None, rows: int, columns: int) -> float:
    if name in (None, "original"):
        return math.sqrt(max(1, rows / columns))
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    raise UsageError(
        f"adjust_lr_fn of Muon is {name!r}; expected 'original', 'match_rms_adamw' or None"
    )


def _of_moments(kind: RuleKind, betas: tuple[float, float], eps: float) -> Rule:
    return Rule(kind=kind, momentum=float(betas[0]), momentum2=float(betas[1]), delta=float(eps))
