"""Training by torch.optim optimizers whose rules the shards apply: workers keep no state of them.

Law: the optimizers stay the script's way to make a step and to set rates. Their own `step` finds no
gradient, since the shards have them all, so it changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from poseidon.errors import SnapshotError, UsageError
from poseidon.torch.checkpoint_file import on_host
from poseidon.torch.optimizer_group import (
    check_closure,
    check_no_closure,
    exchanged_parameters,
)
from poseidon.torch.optimizer_rules import OptimizerRules
from poseidon.torch.rule_group import RuleGroup
from poseidon.torch.tensors import DistributeOptions, ModuleTensors
from poseidon.torch.worker_context import WorkerContext


class ShardOptimizerGroup(RuleGroup):
    """A group whose parameters follow the rules of optimizers on the shards. See `Group`.

    Args:
        optimizers: one or more, of some or all of its parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        tensors: ModuleTensors,
        options: DistributeOptions,
        context: WorkerContext,
    ) -> None:
        wanted = set()
        for optimizer in optimizers:
            check_closure(optimizer)
            wanted |= exchanged_parameters(optimizer, tensors)
        tensors = tensors.trained_by(wanted)
        names = {parameter: name for name, parameter in tensors.trained.items()}
        self._optimizers = optimizers
        self._stepped: list[Optimizer] = []
        """The optimizers whose `step` was called for the step that has ended last."""
        self._begun_rates: tuple[float, ...] = ()
        self._handles: list[RemovableHandle] = []
        rules = OptimizerRules(optimizers, names)
        super().__init__(module, rules, tensors, options, context)
        for optimizer in optimizers:
            optimizer.state.clear()  # some make it before their first step
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))

    @property
    def lr(self) -> float:
        """The rate of the first parameter group. Set `lr` of the optimizer's groups instead."""
        return self._rates()[0]

    @lr.setter
    def lr(self, rate: float) -> None:
        raise UsageError(
            f"group.lr was set to {rate} under {self._how}; expected lr of the optimizer's "
            "param_groups, or a scheduler of torch"
        )

    def step(self, *, zero_grad: bool = True) -> bool:
        """Call the `step` of all optimizers. See `Group`. A script may do so instead."""
        self._check_open("step")
        self._check_zero_grad(zero_grad)
        self._stepped.clear()
        for optimizer in self._optimizers:
            optimizer.step()
        return self._turns.is_first

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        super().close()

    def _before_step(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """End the step at the first optimizer's `step`, for all of them."""
        check_no_closure(arguments, named)
        if not self._passes and self._stepped and optimizer not in self._stepped:
            self._stepped.append(optimizer)
            return
        if self._begun and self._rates() != self._begun_rates:
            raise UsageError(
                f"lr has changed from {self._begun_rates} to {self._rates()} since this step's "
                "first forward pass, and the gradients have left with the old rate; expected "
                "changes between optimizer.step() and the next forward pass (group.settle() before "
                "an evaluation, so that its forward pass begins no step; with virtual workers "
                "`if group.step(): scheduler.step()`)"
            )
        self._end_step()
        self._stepped = [optimizer]

    def _begin(self) -> None:
        self._begun_rates = self._rates()
        super()._begin()

    def _check_unknown(self) -> None:
        own = (p for o in self._optimizers for group in o.param_groups for p in group["params"])
        known = set(self._trained.values())
        self._check_trained(p for p in own if p not in known)

    def _save_how(self) -> dict[str, Any]:
        states = [on_host(optimizer.state_dict()) for optimizer in self._optimizers]
        return {**super()._save_how(), "optimizers": states}

    def _load_how(self, state: Mapping[str, Any]) -> None:
        try:
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
                # It has made steps: else a scheduler that comes first warns of a wrong order.
                optimizer._opt_called = True  # type: ignore[attr-defined]
        except (ValueError, KeyError, TypeError) as error:
            raise SnapshotError(f"the checkpoint is of a different optimizer: {error}") from error
        super()._load_how(state)
