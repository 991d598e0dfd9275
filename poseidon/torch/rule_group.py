"""Training by an update rule: the shards apply it, and workers receive the new parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.base import History, Trained
from poseidon.exchange.membership import Membership
from poseidon.torch.group import Group
from poseidon.torch.masters import as_float32, under_a_rule
from poseidon.torch.sent_gradients import SentGradients
from poseidon.torch.tensors import DistributeOptions, GroupPlan, ModuleTensors
from poseidon.torch.update_rules import ShardRules
from poseidon.torch.worker_context import STEP, WorkerContext
from ps_server.rules import history_count

SCALED = (
    "a GradScaler has read or changed this worker's gradients after backward() had sent them to the "
    "shards; expected bfloat16 autocast, which needs no GradScaler, or a torch.optim optimizer on "
    "the workers"
)


class RuleGroup(Group):
    """A group whose parameters follow an update rule on the shards. See `Group`."""

    def __init__(
        self,
        module: nn.Module,
        rules: ShardRules,
        tensors: ModuleTensors,
        options: DistributeOptions,
        context: WorkerContext,
    ) -> None:
        trained = tensors.trained
        rules.check_groups([*trained, *(table.spec.name for table in tensors.tables)])
        for name, parameter in trained.items():
            if not parameter.is_contiguous():
                raise UsageError(
                    f"'{name}' is not contiguous in memory, so no rule can be applied to it in "
                    "place; expected "
                    "torch.contiguous_format, or a torch.optim optimizer on the workers"
                )
        self._rules = rules
        self._set_rate: float | None = None
        self._sent = SentGradients(context, SCALED)
        plan = GroupPlan(
            tensors=[
                _trained(
                    name,
                    tensor,
                    rules,
                    tensors.rows.get(tensor, 0) * options.passes,
                    context.member,
                    looked_up=tensor in tensors.looked_up,
                )
                if isinstance(tensor, nn.Parameter)
                else Trained(name=name, tensor=as_float32(tensor), statistics=True)
                for name, tensor in tensors.exchanged.items()
            ],
            sources=list(tensors.exchanged.values()),
            rest=tensors.rest,
            clip=options.clip,
            passes=options.passes,
            tables=tensors.tables,
        )
        _check_apart(trained)
        self._trained = trained
        self._of_parameters = {i for i, t in enumerate(plan.tensors) if not t.statistics}
        self._known: dict[str, tuple[int, int]] = {}
        super().__init__(module, plan, context)
        self._note_values()

    @property
    def lr(self) -> float:
        """The learning rate of the current or the next step; the same on every worker.

        It may be set between a step and the next forward pass. From then on it replaces the rule's
        own rate; the rate of Muon's `others` stays.
        """
        return self._rates()[0]

    @lr.setter
    def lr(self, rate: float) -> None:
        if self._begun:
            raise UsageError(
                f"lr was set to {rate} within a step; expected before its forward pass"
            )
        self._set_rate = float(rate)

    @property
    def _how(self) -> str:
        return self._rules.label

    @property
    def _histories_differ(self) -> bool:
        """True if the rule runs on each worker, on its own gradients."""
        return self._exchange.state.private

    def _save_how(self) -> dict[str, Any]:
        return {"lr": self._set_rate, **({} if self._histories_differ else self._histories()[0])}

    def _save_own(self) -> list[dict[str, Any]]:
        return self._histories() if self._histories_differ else super()._save_own()

    def _histories(self) -> list[dict[str, Any]]:
        """Return the histories of the parameters by name, of each virtual worker of this process
        that has one of its own; the first one's include the outer rule's.
        """
        own, outer = self._split_histories()
        return [{"history": one, **({} if at else outer)} for at, one in enumerate(own)]

    def _load_how(self, state: Mapping[str, Any]) -> None:
        self._set_rate = state["lr"]
        own = [self._history_of(trained, state) for trained in self._plan.tensors]
        self._exchange.open(self._with_outer(own, state), state["iterations"])
        self._note_values()

    def _history_of(self, trained: Trained, state: Mapping[str, Any]) -> History:
        """Return a tensor's history in a checkpoint: the shared one, or the history of each virtual
        worker of this process, or for each the mean of all workers' histories.
        """
        shape, count = tuple(trained.tensor.shape), history_count(trained.rule.kind)
        workers = len(self._turns.own) if self._histories_differ else 1
        if trained.statistics:
            return [np.zeros(shape, np.float32)] * count * workers
        owners = [state] if "history" in state else state["own"]
        arrays = [owner["history"].get(trained.name, []) for owner in owners]
        if any(len(a) != count or any(tuple(part.shape) != shape for part in a) for a in arrays):
            raise SnapshotError(
                f"the checkpoint has no history of '{trained.name}' that fits {self._how}"
            )
        if len(owners) > 1 and self._histories_differ:
            return [part.numpy() for number in self._turns.own for part in arrays[number]]
        mean = [torch.stack(column).mean(0).numpy() for column in zip(*arrays, strict=True)]
        return mean * workers

    def step(self, *, zero_grad: bool = True) -> bool:
        """End the step. See `Group`. The new parameters arrive while the next forward pass runs;
        a read waits for them.
        """
        self._check_zero_grad(zero_grad)
        return self._end_step()

    def _check_zero_grad(self, zero_grad: bool) -> None:
        if not zero_grad:
            raise UsageError(
                f"step(zero_grad=False) under {self._how}: the shards use its gradients up, so "
                "none can stay; expected step(), or a torch.optim optimizer on the workers"
            )

    def _on_gradient(self, parameter: Tensor | None = None) -> None:
        if not (self._in_backward or self._begun or self._settled or self._hooks.are_taken):
            raise UsageError(
                f"backward() comes without a use of the module since step {self.steps}, so its "
                "loss was computed before the new values had come; expected a loss that is computed "
                "after step()"
            )
        super()._on_gradient(parameter)

    def _backward_is_over(self) -> None:
        super()._backward_is_over()
        self._sent.note(reversed(self._trained.values()))
        if self._passes >= self._plan.passes:  # new values may come before the step ends
            self._reads.leave(self._of_parameters)

    def _end_step(self) -> bool:
        """End the step, or a turn within it. Return whether it was the step."""
        with DisableTorchFunctionSubclass(), self._reads.turn:
            self._check_passes()
            self._hooks.check_unchanged()
            self._sent.check()
            self._check_unknown()
            self._check_frozen()
            self._check_unchanged()
            if self._leave_turn():
                return False
            with self._collections.calling(STEP):
                self._end_iteration()
                self._collections.finish_step()
                if self._check.is_due(self.steps):
                    self._exchange.settle()
                    self._check.run(self.steps)
            # a graph of the step before is not to be used again
            for parameter in self._trained.values():
                torch.autograd.graph.increment_version(parameter)
            self._note_values()
            self._reads.leave()
            self._reads.read_aliased()
        return True

    def _before_begin(self) -> None:
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Refuse what the script has written since the last step, also an optimizer of its own."""
        for name, value in self._values().items():
            if self._known[name] != value:
                raise UsageError(
                    f"'{name}' was changed by the script after distribute(), and the shards' value "
                    "would take its place; expected changes before distribute(), or a torch.optim "
                    "optimizer on the workers"
                )

    def _before_run(self) -> None:
        if self._passes >= self._plan.passes:
            raise UsageError(
                f"the module was used after {self._passes} backward pass(es) and before step(), "
                "while its parameters change; expected step() first, passes= for the number of "
                "passes that a step adds up, or requires_grad_(False) on it while the loss of "
                "another module passes through it"
            )

    def _may_leave(self, index: int) -> bool:
        # The graph may have an alias, as of weight.detach(), that a node which is still to run uses.
        return not self._reads.is_aliased(index)

    def _on_sent(self, index: int) -> None:
        self._reads.leave({index})

    def _bring(self, index: int) -> None:
        when = ""
        if self._passes >= self._plan.passes:
            when = f"after {self._passes} backward pass(es)"
        elif self._in_backward and self._hooks.has_left(index):
            when = "in a hook, after its gradient has left,"
        if when:
            raise UsageError(
                f"'{self._plan.tensors[index].name}' is read or written {when} and before step(), "
                "while the shards change it; expected that before backward() or after step(), and "
                "no optimizer's step() beside a rule"
            )
        super()._bring(index)

    def _check_unknown(self) -> None:
        """Refuse gradients of parameters that no shard trains."""
        self._check_trained(self._module.parameters())

    def _check_trained(self, parameters: Iterable[nn.Parameter]) -> None:
        known = {*self._trained.values(), *self._plan.rest_of_tables}
        for parameter in parameters:
            if parameter not in known and parameter.requires_grad and parameter.grad is not None:
                raise UsageError(
                    f"{self._name(parameter)} has a gradient, but wanted none, or was not there, "
                    "when distribute() was called: no shard trains it; expected a module that is "
                    "whole, with all that is ever trained"
                )

    def _check_frozen(self) -> None:
        for name, parameter in self._trained.items():
            if not parameter.requires_grad:
                raise UsageError(
                    f"'{name}' was frozen after distribute(), but momentum and decay on the "
                    "shards would move it on; expected "
                    "a torch.optim optimizer on the workers, or it frozen before"
                )

    def _note_values(self) -> None:
        self._known = self._values()

    def _values(self) -> dict[str, tuple[int, int]]:
        """Return for each parameter what changes with the address of its memory, and whenever
        autograd sees a write to it.
        """
        with DisableTorchFunctionSubclass():
            return {name: (p.data_ptr(), p._version) for name, p in self._trained.items()}

    def _rates(self) -> tuple[float, ...]:
        own, *others = self._rules.rates(self.steps) or (0.0,)
        return own if self._set_rate is None else self._set_rate, *others


def _trained(
    name: str,
    parameter: nn.Parameter,
    rules: ShardRules,
    factor_rows: int,
    member: Membership,
    *,
    looked_up: bool,
) -> Trained:
    shape = tuple(parameter.shape)
    rule = rules.server_rule(name, shape)
    # Of its data: a value from the shards does not count as a change by the script
    # (`_before_begin`).
    held = under_a_rule(parameter.data, member)
    return Trained(
        name=name,
        tensor=held,
        rule=rule,
        rate_index=rules.rate_index(name, shape),
        factor_rows=factor_rows if rule.matrix is None else 0,
        looked_up=looked_up and held.dtype is torch.float32,
    )


def _check_apart(trained: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that share memory: each has a value of its own on the shards."""
    placed = sorted(
        (p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in trained.items() if p.numel()
    )
    for (_, end, name), (start, _, other) in pairwise(placed):
        if start < end:
            raise UsageError(
                f"'{name}' and '{other}' share memory, though they are two parameters; expected "
                "one parameter in both places, or a torch.optim optimizer on the workers"
            )
