"""The row tables of a module, their update rules, and what they cannot be combined with.

Poseidon's rules and torch's optimizers become rules of rows (`ps_server/row_rules.py`). They change
only the rows that have a gradient in the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poseidon.errors import UsageError
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeOptions
from poseidon.torch.tables.table import Table
from poseidon.torch.update_rules import SGD, AdaGrad, Adam, UpdateRule
from ps_server import RowRule, RowRuleKind
from ps_server.protocol.row_settings import RowTableSpec


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
            f"table '{name}' cannot use {type(rule).__name__} with these arguments, which moves "
            "rows without a gradient too; use SGD without momentum, Adam (its moments stay where "
            "a row has no gradient), AdaGrad or RowWiseAdaGrad, without weight decay"
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
            f"table '{name}' has sparse gradients, which torch.optim.{kind.__name__}{detail} cannot "
            "apply; use SparseAdam, SGD without momentum, or Adagrad, without weight decay, or set "
            "sparse=False"
        )
    return made(group)


SparseEmbedding = nn.Embedding | nn.EmbeddingBag


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTable:
    """A row table of a module.

    Attributes:
        module: that looks rows up.
        rate: returns the rate of a step, counted from 0; None: the group's rate is its own.
        rate_factor: multiplies the rate.
    """

    module: Table | SparseEmbedding
    spec: RowTableSpec
    rate: Callable[[int], float] | None
    rate_factor: float = 1.0


def plan_tables(module: nn.Module, how: object, options: ExchangeOptions) -> list[PlannedTable]:
    """Return the row tables of a module, in the order of its layers.

    The weight of a sparse embedding is a table, if no other module uses it and `how` trains it.
    With local steps, a torch optimizer trains it on each worker.

    Args:
        how: the rule, optimizer or optimizers that `distribute` was given.

    Raises:
        UsageError: a table cannot be trained as its arguments say.
    """
    optimizers = optimizers_of(how)
    rule = how if isinstance(how, UpdateRule) else None
    found, users = [], users_of_parameters(module)
    for name, child in module.named_modules():
        if isinstance(child, Table):
            found.append(_of_table(name, child, rule))
        elif _is_sparse(child) and users[child.weight] == 1:
            weight_name = f"{name}.weight" if name else "weight"
            if rule is not None:
                own, factor = row_rule(rule, weight_name)
                found.append(_of_embedding(weight_name, child, own, None, factor))
            elif not options.local_steps and (trainer := _trainer(child.weight, optimizers)):
                optimizer, number = trainer
                own = rule_of_optimizer(optimizer, optimizer.param_groups[number], weight_name)
                rate = _rate_of(optimizer, number)
                found.append(_of_embedding(weight_name, child, own, rate, 1.0))
    of_job = options.staleness
    return [replace(t, spec=replace(t.spec, staleness=of_job)) for t in found]


def optimizers_of(how: object) -> list[Optimizer]:
    """Return the optimizers that `distribute` was given; none if it was given something else."""
    given = list(how) if isinstance(how, Sequence) else [how]
    found = [one for one in given if isinstance(one, Optimizer)]
    return found if len(found) == len(given) else []


def _of_table(name: str, table: Table, rule: UpdateRule | None) -> PlannedTable:
    rule = table.rule or rule
    if rule is None:
        raise UsageError(
            f"table '{name}' has no rule, and is not a parameter of a torch optimizer; write "
            "Table(..., rule=poseidon.Adam(lr=...))"
        )
    own, factor = row_rule(rule, name)
    return PlannedTable(
        module=table,
        spec=replace(table.spec, name=name, rule=own),
        rate=None if table.rule is None else table.rule.rate,
        rate_factor=factor,
    )


def _of_embedding(
    name: str,
    module: SparseEmbedding,
    rule: RowRule,
    rate: Callable[[int], float] | None,
    rate_factor: float,
) -> PlannedTable:
    if module.max_norm is not None:
        raise UsageError(
            f"'{name}' is sparse and its module has max_norm, with which each worker would change "
            "rows by itself; set max_norm=None or sparse=False"
        )
    if module.weight.dtype is not torch.float32:
        raise UsageError(
            f"'{name}' is {module.weight.dtype}; expected sparse embeddings of torch.float32"
        )
    rows, dim = module.weight.shape
    spec = RowTableSpec(name=name, rows=rows, dim=dim, rule=rule)
    return PlannedTable(module=module, spec=spec, rate=rate, rate_factor=rate_factor)


def _trainer(weight: Tensor, optimizers: Sequence[Optimizer]) -> tuple[Optimizer, int] | None:
    """Return the optimizer that trains a parameter, with its group's number; None: none does."""
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            if any(parameter is weight for parameter in group["params"]):
                return optimizer, number
    return None


def _rate_of(optimizer: Optimizer, number: int) -> Callable[[int], float]:
    # `load_state_dict` replaces the groups.
    return lambda step: float(optimizer.param_groups[number]["lr"])


def users_of_parameters(module: nn.Module) -> Counter[Tensor]:
    """Return the number of places of each parameter in the modules."""
    return Counter(p for child in module.modules() for p in child.parameters(recurse=False))


def _is_sparse(module: nn.Module) -> TypeGuard[SparseEmbedding]:
    return (
        isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.sparse
        and module.weight.requires_grad
    )


def check_tables(tables: Sequence[PlannedTable], member: Membership, clip: float | None) -> None:
    """Refuse what row tables cannot be combined with."""
    if not tables:
        return
    options, virtual, reason = member.options, member.by_worker, ""
    if clip is not None:
        reason = "leave out clip=, because the shards have the gradients of rows"
    elif options.local_steps:
        reason = "leave out --local_steps, because workers hold few of their rows"
    elif member.network.size > 1 and not (member.shards and options.kind.has_shards):
        reason = (
            "use --exchange=ps, because only shards hold its rows (auto has none on one machine)"
        )
    elif member.takes_turns:
        reason = (
            f"start as many workers as virtual workers: {virtual.processes} for {virtual.count} would "
            "compute their gradients one after another"
        )
    if reason:
        raise UsageError(f"table '{tables[0].spec.name}' has sparse gradients: {reason}")
