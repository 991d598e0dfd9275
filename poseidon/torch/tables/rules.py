"""The update rules of row tables: of Poseidon's rules and of torch's optimizers.

A rule moves only the rows that a step has gradients of (`ps_server/row_rules.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from poseidon.errors import UsageError
from poseidon.torch.update_rules import SGD, AdaGrad, Adam, UpdateRule
from ps_server import RowRule, RowRuleKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWiseAdaGrad(AdaGrad):
    """AdaGrad with one accumulator for each row of a table, of the mean square of its gradient:
    h <- h + mean(g^2); w <- w - r g / (sqrt(h) + eps). Caffe2's RowWiseSparseAdagrad.

    Parameters that are not tables follow `AdaGrad`.
    """


_RULES: dict[type, Callable[..., RowRule]] = {
    SGD: lambda rule: RowRule(kind=RowRuleKind.SGD),
    Adam: lambda rule: RowRule(
        kind=RowRuleKind.ADAM,
        beta1=float(rule.betas[0]),
        beta2=float(rule.betas[1]),
        eps=float(rule.eps),
    ),
    AdaGrad: lambda rule: RowRule(kind=RowRuleKind.ADAGRAD, eps=float(rule.eps)),
    RowWiseAdaGrad: lambda rule: RowRule(kind=RowRuleKind.ROW_WISE_ADAGRAD, eps=float(rule.eps)),
}


def row_rule(rule: UpdateRule, name: str) -> tuple[RowRule, float]:
    """Return the rule of the row table of a name, and what multiplies its rate.

    Raises:
        UsageError: the rule would move rows without a gradient.
    """
    made, dense = _RULES.get(type(rule)), rule.server_rule(name, (1, 1))
    if made is None or (type(rule) is SGD and dense.momentum) or dense.decay:
        raise UsageError(
            f"table '{name}' cannot follow {type(rule).__name__} with these arguments, which moves "
            "rows without a gradient too; expected SGD without momentum, Adam (its moments stay "
            "where a row has no gradient), AdaGrad or RowWiseAdaGrad, without weight decay"
        )
    return made(rule), dense.rate_factor


_OPTIMIZERS: dict[
    type[Optimizer], tuple[tuple[str, ...], Callable[[Mapping[str, Any]], RowRule]]
] = {
    torch.optim.SGD: (
        ("momentum", "weight_decay", "maximize"),
        lambda group: RowRule(kind=RowRuleKind.SGD),
    ),
    torch.optim.SparseAdam: (
        ("maximize",),
        lambda group: RowRule(
            kind=RowRuleKind.ADAM,
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
        ),
    ),
    torch.optim.Adagrad: (
        ("lr_decay", "weight_decay", "initial_accumulator_value", "maximize"),
        lambda group: RowRule(kind=RowRuleKind.ADAGRAD, eps=float(group["eps"])),
    ),
}
"""For each optimizer of sparse gradients: options that its rule does not have, and the rule."""


def rule_of_optimizer(optimizer: Optimizer, group: Mapping[str, Any], name: str) -> RowRule:
    """Return the rule of the row table of a name, a parameter of an optimizer's group.

    Raises:
        UsageError: the optimizer does not take sparse gradients, or has an option that the rule
            does not have.
    """
    kind = type(optimizer)
    off, made = _OPTIMIZERS.get(kind, ((), None))
    wrong = next((option for option in off if group[option]), None)
    if made is None or wrong is not None:
        detail = f" with {wrong}={group[wrong]}" if wrong is not None else ""
        raise UsageError(
            f"table '{name}' has sparse gradients, and cannot follow torch.optim.{kind.__name__}"
            f"{detail}; expected SparseAdam, SGD without momentum, or Adagrad, without weight "
            "decay, or sparse=False"
        )
    return made(group)
