"""The update rules of row tables, as values with torch's arguments.

A rule moves only the rows that a step has gradients of (`ps_server/row_rules.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from poseidon.engine.module.update_rules import SGD, AdaGrad, Adam, UpdateRule
from poseidon.errors import UsageError
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
