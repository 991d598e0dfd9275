"""The rules of torch.optim optimizers: what the shards apply in their place.

Law: a conversion is exact or refused. The constants of a parameter group are those that it had when
`distribute` was called; a rate is read when a step begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from poseidon.errors import UsageError
from poseidon.torch.update_rules import (
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    AdamW,
    Muon,
    RMSProp,
    UpdateRule,
)
from ps_server import Rule

ON_WORKERS = 'expected on="workers"'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversion:
    """The rule of an optimizer's class.

    Attributes:
        constants: the options of a parameter group that are its arguments.
        off: options that the rule does not have.
    """

    rule: type[UpdateRule]
    constants: tuple[str, ...]
    off: tuple[str, ...] = ("maximize",)


_MOMENTS = ("betas", "eps", "weight_decay")
_OFF = ("amsgrad", "maximize")
_CONVERSIONS: dict[type[Optimizer], _Conversion] = {
    torch.optim.SGD: _Conversion(
        rule=SGD, constants=("momentum", "dampening", "nesterov", "weight_decay")
    ),
    torch.optim.Adam: _Conversion(rule=Adam, constants=_MOMENTS, off=_OFF),
    torch.optim.AdamW: _Conversion(rule=AdamW, constants=_MOMENTS, off=_OFF),
    torch.optim.Adagrad: _Conversion(
        rule=AdaGrad,
        constants=("eps", "weight_decay"),
        off=("lr_decay", "initial_accumulator_value", "maximize"),
    ),
    torch.optim.RMSprop: _Conversion(
        rule=RMSProp,
        constants=("alpha", "eps", "weight_decay"),
        off=("momentum", "centered", "maximize"),
    ),
    torch.optim.Adadelta: _Conversion(rule=AdaDelta, constants=("rho", "eps", "weight_decay")),
    torch.optim.Muon: _Conversion(
        rule=Muon,
        constants=(
            *("momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn"),
            "weight_decay",
        ),
        off=(),
    ),
}


class OptimizerRules:
    """The rules of the parameters of some optimizers, in place of an `UpdateRule`.

    Each parameter group has a rate of its own.

    Args:
        optimizers: of classes that have a rule, unless they have none of these parameters; each
            parameter in one of them. None has made a step.
        names: the parameters' names in the module, without row tables.

    Raises:
        UsageError: an optimizer has no exact rule, or has made steps.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[nn.Parameter, str]) -> None:
        self._all = optimizers
        self._optimizers = [optimizer for optimizer in optimizers if _trains(optimizer, names)]
        for optimizer in self._optimizers:
            _check_convertible(optimizer)
        self._rules: list[UpdateRule] = []
        self._constants: list[dict[str, Any]] = []
        self._index: dict[str, int] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for name in (names[p] for p in group["params"] if p in names):
                    if name in self._index:
                        raise UsageError(
                            f"'{name}' is in two parameter groups; expected each parameter in one"
                        )
                    self._index[name] = len(self._rules)
                self._constants.append(_constants(optimizer, group))
                self._rules.append(_rule(optimizer, group))

    @property
    def label(self) -> str:
        """The names of the optimizers, for messages and checkpoints."""
        classes = " and ".join(f"torch.optim.{type(o).__name__}" for o in self._all)
        return f"{classes} on the shards"

    def server_rule(self, name: str, shape: Sequence[int]) -> Rule:
        """Return the shards' rule for a parameter. Raises as `UpdateRule.server_rule`."""
        return self._rules[self._index[name]].server_rule(name, shape)

    def rate_index(self, name: str, shape: Sequence[int]) -> int:
        """Return the number of a parameter's group among the groups of all optimizers."""
        return self._index[name]

    def rates(self, step: int) -> tuple[float, ...]:
        """Return the present rate of each parameter group.

        Raises:
            UsageError: one is not a number of 0 or more, or other constants have changed.
        """
        groups = [(o, group) for o in self._optimizers for group in o.param_groups]
        known = groups[: len(self._constants)]
        for number, (optimizer, group) in enumerate(known):
            now, before = _constants(optimizer, group), self._constants[number]
            if now != before:
                raise UsageError(_changed(number, before, now))
        return tuple(_rate(group, number) for number, (_, group) in enumerate(known))

    def check_groups(self, names: Sequence[str]) -> None:
        """Do nothing: groups of optimizers have parameters, not patterns."""


def _trains(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> bool:
    return any(p in names for group in optimizer.param_groups for p in group["params"])


def _check_convertible(optimizer: Optimizer) -> None:
    """Refuse an optimizer without an exact rule, or with a state."""
    name = f"torch.optim.{type(optimizer).__name__}"
    conversion = _CONVERSIONS.get(type(optimizer))
    if conversion is None:
        found = ", ".join(kind.__name__ for kind in _CONVERSIONS)
        kind = type(optimizer)
        raise UsageError(
            f"the shards have no rule of {kind.__module__}.{kind.__qualname__}; expected one of "
            f'torch.optim\'s {found}, or on="workers"'
        )
    for group in optimizer.param_groups:
        for option in conversion.off:
            if group[option]:
                raise UsageError(
                    f"the shards have no rule of {name} with {option}={group[option]}; "
                    f"{ON_WORKERS}, or the default of {option}"
                )
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise UsageError(
            f"{name} has already made steps, whose state the shards do not have; use a new optimizer "
            'and group.resume() or group.load_state_dict(), or on="workers"'
        )


def _has_stepped(state: Mapping[str, Any]) -> bool:
    if "step" in state:
        return bool(state["step"] > 0)
    return any(value is not None for value in state.values())


def _constants(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: group[name] for name in _conversion(optimizer, group).constants}
    return {name: tuple(value) if name == "betas" else value for name, value in found.items()}


def _conversion(optimizer: Optimizer, group: Mapping[str, Any]) -> _Conversion:
    kind = type(optimizer)
    decoupled = kind is torch.optim.Adam and group.get("decoupled_weight_decay", False)
    return _CONVERSIONS[torch.optim.AdamW if decoupled else kind]


def _rule(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    rule = _conversion(optimizer, group).rule
    constants = _constants(optimizer, group)
    found: UpdateRule = rule(lr=float(group["lr"]), **constants)
    return found


def _rate(group: Mapping[str, Any], number: int) -> float:
    rate = float(group["lr"])
    if not math.isfinite(rate) or rate < 0:
        raise UsageError(f"lr of parameter group {number} is {rate}; expected a number, 0 or more")
    return rate


def _changed(number: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    name = next(name for name, value in before.items() if now[name] != value)
    hint = ", cycle_momentum=False of a scheduler" if name in ("betas", "momentum") else ""
    return (
        f"{name} of parameter group {number} is {now[name]}, and was {before[name]} when "
        f"distribute() was called: the shards' rule keeps it; expected changes of lr only{hint}, "
        'or on="workers"'
    )
