"""The first way: the shards apply an update rule, and the parameters that come back are the new ones."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
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
                    # Its data: what comes from the shards is no change by the script (`_before_begin`).
                    tensor=tensor.data if name in trained else tensor,
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
        _check_apart(trained)
        self._trained = trained
        self._known: dict[str, tuple[int, int]] = {}
        super().__init__(module, together, workplace)
        self._note_values()

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
        self._check_strangers()
        self._end_iteration()
        for parameter in self._trained.values():  # a graph of the step before is not to be used again
            torch.autograd.graph.increment_version(parameter)
        self._note_values()

    def _before_begin(self) -> None:
        for name, parameter in self._trained.items():
            if self._known[name] != _value_of(parameter):
                raise UsageError(
                    f"'{name}' was changed by the script after distribute(), and the shards' value would take its place; "
                    "expected changes before distribute(), or a torch.optim optimizer"
                )

    def _before_run(self) -> None:
        if self._passes >= self._together.passes:
            raise UsageError(
                f"the module was used after {self._passes} backward pass(es) and before step(), while its parameters "
                "change; expected step() first, or passes= for the number of passes that a step adds up"
            )

    def _check_strangers(self) -> None:
        known = set(self._trained.values())
        for parameter in self._module.parameters():
            if parameter not in known and parameter.requires_grad and parameter.grad is not None:
                raise UsageError(
                    f"{self._name(parameter)} has a gradient, but wanted none, or was not there, when distribute() was called: "
                    "no shard trains it; expected a module that is whole, with all that is ever trained"
                )
        for name, parameter in self._trained.items():
            if not parameter.requires_grad:
                raise UsageError(
                    f"'{name}' was frozen after distribute(), but momentum and decay on the shards would move it on; expected "
                    "a torch.optim optimizer, or it frozen before"
                )

    def _note_values(self) -> None:
        self._known = {name: _value_of(parameter) for name, parameter in self._trained.items()}

    def _rate(self) -> float:
        return self._rule.rate(self._steps) if self._set_rate is None else self._set_rate


def _value_of(parameter: nn.Parameter) -> tuple[int, int]:
    """Changes with the place of its memory, and whenever autograd sees that it is written to."""
    return parameter.data_ptr(), parameter._version


def _check_apart(trained: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters in one another's memory: each has a value of its own on the shards."""
    placed = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in trained.items() if p.numel())
    for (_, end, name), (start, _, other) in pairwise(placed):
        if start < end:
            raise UsageError(
                f"'{name}' and '{other}' share memory, though they are two parameters; expected one parameter in both places, "
                "or a torch.optim optimizer"
            )
