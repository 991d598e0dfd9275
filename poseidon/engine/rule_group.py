"""The first way: the shards apply an update rule, and the parameters that come back are the new ones."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from poseidon.engine.group import Group, Together
from poseidon.engine.module_tensors import ModuleTensors
from poseidon.engine.update_rules import UpdateRule
from poseidon.engine.workplace import Workplace
from poseidon.errors import UsageError
from poseidon.exchange.base import Trained


class RuleGroup(Group):
    """See `Group`.

    Args:
        module: the module.
        rule: what its parameters follow.
        tensors: what of it is kept together.
        rows: of the factors of each weight that may travel so.
        clip: largest L2 norm of all mean gradients together.
        passes: backward passes a step.
        workplace: this worker.
    """

    def __init__(
        self,
        module: nn.Module,
        rule: UpdateRule,
        tensors: ModuleTensors,
        rows: Mapping[nn.Parameter, int],
        *,
        clip: float | None,
        passes: int,
        workplace: Workplace,
    ) -> None:
        trained = tensors.trained
        rule.check_groups(list(trained))
        for name, parameter in trained.items():
            if not parameter.is_contiguous():
                raise UsageError(
                    f"'{name}' is not contiguous in memory, so no rule can be applied to it in place"
                )
        self._rule = rule
        self._set_rate: float | None = None
        together = Together(
            tensors=[
                Trained(
                    name=name,
                    tensor=tensor,
                    rule=rule.server_rule(name),
                    factor_rows=rows.get(trained[name], 0) * passes if name in trained else 0,
                    statistics=name not in trained,
                )
                for name, tensor in tensors.moving.items()
            ],
            sources=list(tensors.moving.values()),
            rest=list(tensors.rest.values()),
            clip=clip,
            passes=passes,
        )
        super().__init__(module, together, workplace)

    @property
    def lr(self) -> float:
        """The rate of the step that is under way, or comes next; the same on every worker.

        It may be set between a step and the next forward pass: gradients leave with it. From then on it counts
        in place of the rule's own.
        """
        return self._rate()

    @lr.setter
    def lr(self, rate: float) -> None:
        if self._begun:
            raise UsageError(f"lr was set to {rate} within a step; expected before its forward pass")
        self._set_rate = float(rate)

    def step(self) -> None:
        """See `Group`. The new parameters come while the next forward pass runs."""
        self._end_iteration()

    def _rate(self) -> float:
        return self._rule.rate(self._steps) if self._set_rate is None else self._set_rate
