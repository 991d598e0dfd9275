"""The first way: the shards apply an update rule, and the parameters that come back are the new ones."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from poseidon.engine.module.group import Group, Together
from poseidon.engine.module.tensors import ModuleTensors
from poseidon.engine.module.update_rules import UpdateRule
from poseidon.engine.module.worker_context import WorkerContext
from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.base import History, Trained
from ps_server.rules import history_count


class RuleGroup(Group):
    """See `Group`.

    Args:
        module: the module.
        rule: what its parameters follow.
        tensors: what of it is kept together.
        rows: of the factors of each weight that may travel so.
        clip: largest L2 norm of all mean gradients together.
        passes: backward passes a step.
        context: this worker.
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
        context: WorkerContext,
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
            rest=tensors.rest,
            clip=clip,
            passes=passes,
        )
        _check_apart(trained)
        self._trained = trained
        self._known: dict[str, tuple[int, int]] = {}
        super().__init__(module, together, context)
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

    @property
    def _how(self) -> str:
        return f"poseidon.{type(self._rule).__name__}"

    @property
    def _histories_differ(self) -> bool:
        """Whether the rule runs on each worker, on its own gradients."""
        return self._context.member.private_histories

    def _save_how(self) -> dict[str, Any]:
        return {"lr": self._set_rate, **({} if self._histories_differ else self._histories())}

    def _save_own(self) -> dict[str, Any]:
        return self._histories() if self._histories_differ else {}

    def _replicated(self) -> dict[str, Tensor]:
        values = {trained.name: trained.tensor for trained in self._together.tensors}
        return {**values, **self._exchange.state.replicated()}

    def _histories(self) -> dict[str, Any]:
        """By name, of the parameters."""
        found = zip(self._together.tensors, self._exchange.state.histories(), strict=True)
        return {
            "history": {
                t.name: [torch.tensor(array) for array in history] for t, history in found if not t.statistics
            }
        }

    def _load_how(self, state: Mapping[str, Any]) -> None:
        self._set_rate = state["lr"]
        given = [self._history_of(trained, state) for trained in self._together.tensors]
        self._exchange.open(given, state["steps"])
        self._note_values()

    def _history_of(self, trained: Trained, state: Mapping[str, Any]) -> History:
        """Of a job that shared one: that one. Of one whose workers had one each: this worker's, or their mean."""
        shape, count = tuple(trained.tensor.shape), history_count(trained.rule.kind)
        if trained.statistics:
            return [np.zeros(shape, np.float32)] * count
        owners = [state] if "history" in state else state["own"]
        if len(owners) > 1 and self._histories_differ:
            owners = [owners[self.rank]]
        arrays = [owner["history"].get(trained.name, []) for owner in owners]
        if any(len(a) != count or any(tuple(part.shape) != shape for part in a) for a in arrays):
            raise SnapshotError(f"the checkpoint has no history of '{trained.name}' that fits {self._how}")
        return [torch.stack(column).mean(0).numpy() for column in zip(*arrays, strict=True)]

    def step(self) -> None:
        """See `Group`. The new parameters come while the next forward pass runs."""
        self._check_strangers()
        self._end_iteration()
        if self._check.is_due(self._steps):
            self._exchange.settle()
            self._check.run(self._steps)
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
