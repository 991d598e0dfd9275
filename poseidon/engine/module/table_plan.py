"""Which row tables a module has, and what they cannot be combined with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from poseidon.engine.module.table import Table
from poseidon.engine.module.table_rules import row_rule
from poseidon.engine.module.update_rules import UpdateRule
from poseidon.errors import UsageError
from poseidon.exchange.membership import Membership
from ps_server.protocol.row_settings import RowTableSpec

SparseEmbedding = nn.Embedding | nn.EmbeddingBag


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTable:
    """A row table of a module.

    Attributes:
        module: that looks rows up.
        spec: the table.
        rule: that its rate comes from; None: the group's.
        rate_factor: multiplies the rate.
    """

    module: Table | SparseEmbedding
    spec: RowTableSpec
    rule: UpdateRule | None
    rate_factor: float


def plan_tables(module: nn.Module, how: object, staleness: int) -> list[PlannedTable]:
    """Return the row tables of a module, in the order of its layers.

    The weights of sparse embeddings are tables where `how` is an update rule, if no other module
    uses them.

    Args:
        module: the module.
        how: the rule or optimizer that `distribute` was given.
        staleness: of the job.

    Raises:
        UsageError: a table cannot be trained as its arguments say.
    """
    rule = how if isinstance(how, UpdateRule) else None
    found = []
    users = _users(module)
    for name, child in module.named_modules():
        if isinstance(child, Table):
            if child.rule is None and rule is None:
                raise UsageError(
                    f"table '{name}' has no rule, and torch.optim runs on the workers, which do not "
                    "hold it; expected Table(..., rule=poseidon.Adam(lr=...))"
                )
            own, factor = row_rule(child.rule or rule, name)  # type: ignore[arg-type]
            spec = replace(child.spec, name=name, rule=own, staleness=staleness)
            found.append(PlannedTable(module=child, spec=spec, rule=child.rule, rate_factor=factor))
        elif rule is not None and _is_sparse(child) and users[child.weight] == 1:
            _check_embedding(name, child)
            weight_name = f"{name}.weight" if name else "weight"
            own, factor = row_rule(rule, weight_name)
            rows, dim = child.weight.shape
            spec = RowTableSpec(name=weight_name, rows=rows, dim=dim, rule=own, staleness=staleness)
            found.append(PlannedTable(module=child, spec=spec, rule=None, rate_factor=factor))
    return found


def _users(module: nn.Module) -> dict[Tensor, int]:
    """Return the number of places of each parameter in the modules."""
    found: dict[Tensor, int] = {}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            found[parameter] = found.get(parameter, 0) + 1
    return found


def _is_sparse(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.sparse
        and module.weight.requires_grad
    )


def _check_embedding(name: str, module: SparseEmbedding) -> None:
    if module.max_norm is not None:
        raise UsageError(
            f"'{name}' is sparse and has max_norm, with which each worker would change rows by "
            "itself; expected max_norm=None or sparse=False"
        )
    if module.weight.dtype is not torch.float32:
        raise UsageError(
            f"'{name}' is {module.weight.dtype}; expected sparse embeddings of torch.float32"
        )


def check_tables(tables: Sequence[PlannedTable], member: Membership, clip: float | None) -> None:
    """Refuse what row tables cannot be combined with.

    Raises:
        UsageError: the job has such a thing.
    """
    if not tables:
        return
    options, reason = member.options, ""
    if clip is not None:
        reason = "no clip=, because the shards have the gradients of rows"
    elif options.sync_every:
        reason = "no local steps (--sync_every), because workers hold few of their rows"
    elif member.local_workers > 1:
        reason = "one worker a host, because each exchanges rows with the shards itself"
    elif not (member.alone or options.kind.has_shards):
        reason = "shards to hold them: --exchange=auto, ps, hybrid or svb"
    if reason:
        raise UsageError(f"table '{tables[0].spec.name}' has sparse gradients; expected {reason}")
