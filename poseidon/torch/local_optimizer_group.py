"""Training by a torch.optim optimizer with local steps: it runs on this worker's own
gradients, and workers exchange once a round.

Law: between the ends of two rounds a worker trains as in a process of its own: `grad` is this
worker's gradient, which a script may read and change. `step` returns at the end of a round with the
values that all workers have.

Where a process has several virtual workers, the optimizer makes a step in the turn of each
(`optimizer_turns.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from poseidon.errors import UsageError
from poseidon.exchange.base import History, Trained
from poseidon.exchange.options import ExchangeOptions
from poseidon.torch.checkpoint_file import on_host
from poseidon.torch.group import Group
from poseidon.torch.optimizer_group import OptimizerGroup, exchanged_parameters
from poseidon.torch.optimizer_turns import OptimizerTurns
from poseidon.torch.tensors import DistributeOptions, GroupPlan, ModuleTensors
from poseidon.torch.worker_context import STEP
from ps_server import Rule, RuleKind
from ps_server.rules import clip_factor, plain_sum, sum_of_squares


def is_synchronous(
    optimizer: torch.optim.Optimizer, options: DistributeOptions, exchange: ExchangeOptions
) -> bool:
    """Return whether local steps of this optimizer are synchronous training
    (`poseidon.exchange.rounds.local_steps`).
    """
    return (
        type(optimizer) is torch.optim.SGD
        and all(group["momentum"] == 0 for group in optimizer.param_groups)
        and options.clip is None
        and exchange.one_plain_step
    )


class LocalOptimizerGroup(OptimizerGroup):
    """An `OptimizerGroup` with local steps."""

    @cached_property
    def _of_turns(self) -> OptimizerTurns | None:
        """The states of the optimizer; None: this process has one virtual worker."""
        own = len(self._turns.own)
        return OptimizerTurns(self._optimizer, own) if own > 1 else None

    def _make_plan(self, tensors: ModuleTensors, options: DistributeOptions) -> GroupPlan:
        wanted = exchanged_parameters(self._optimizer, tensors)
        exchanged = {
            n: t
            for n, t in tensors.exchanged.items()
            if t in wanted or not isinstance(t, nn.Parameter)
        }
        coarse = next((n for n, t in exchanged.items() if t.dtype is not torch.float32), None)
        if coarse is not None:
            raise UsageError(
                f"'{coarse}' is {exchanged[coarse].dtype}, and local steps of a torch optimizer "
                "exchange parameters of torch.float32; expected these, or a rule"
            )
        self._means = {p: p for p in exchanged.values() if isinstance(p, nn.Parameter)}
        return GroupPlan(
            tensors=[
                Trained(name=name, tensor=tensor, rule=Rule(kind=RuleKind.MEAN))
                if tensor in wanted
                else Trained(name=name, tensor=tensor, statistics=True)
                for name, tensor in exchanged.items()
            ],
            sources=list(exchanged.values()),
            rest={
                **tensors.rest,
                **{n: t for n, t in tensors.exchanged.items() if n not in exchanged},
            },
            clip=options.clip,
            passes=options.passes,
            sends_gradients=False,
        )

    def _replicated(self) -> dict[str, Tensor]:
        return Group._replicated(self)

    def _save_how(self) -> dict[str, Any]:
        return {}

    def _save_own(self) -> list[dict[str, Any]]:
        _, outer = self._split_histories()
        found = []
        for at in range(len(self._turns.own)):
            self._enter(at)
            state = on_host(self._optimizer.state_dict())
            found.append({"optimizer": state, **({} if at else outer)})
        self._enter(0)
        return found

    def _load_optimizer(self, state: Mapping[str, Any]) -> None:
        of_all = state.get("optimizer")
        for at, virtual_worker in enumerate(self._turns.own):
            own = state["own"][virtual_worker]["optimizer"] if of_all is None else of_all
            self._enter(at)
            self._optimizer.load_state_dict(deepcopy(own))
        self._enter(0)

    def _enter(self, at: int) -> None:
        if self._of_turns is not None:
            self._of_turns.enter(at)

    def _open_again(self, state: Mapping[str, Any]) -> None:
        none: list[History] = [()] * len(self._plan.tensors)
        self._exchange.open(self._with_outer(none, state), state["iterations"])

    def average_gradients(self) -> bool:
        """Do nothing: with local steps a step uses the gradients of this worker.

        Raises:
            UsageError: there was no backward pass.
        """
        self._check_passes()
        return True

    def _backward_is_over(self) -> None:
        Group._backward_is_over(self)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._check_step(optimizer, arguments, named)
        if getattr(optimizer, "found_inf", None) is not None:
            raise UsageError(
                "a GradScaler may leave out a step on one worker, and with local steps all make "
                "equally many; expected bfloat16 autocast, which needs none"
            )
        self._check_rates()
        if self._turns.is_last:
            self._end_passes()
        else:
            self._check_passes()
            self._hooks.wait_for_rest()
        if self._plan.clip is not None:
            gradients = [p.grad for p in self._means if p.grad is not None]
            factor = clip_factor(plain_sum(map(sum_of_squares, gradients)), self._plan.clip)
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
        if self._of_turns is not None:
            self._of_turns.before_step()

    def _after_step(
        self, optimizer: object, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        if self._of_turns is not None:
            self._of_turns.after_step()
        if self._leave_turn():
            return
        with self._collections.calling(STEP):
            self._finish_iteration()
            self._collections.finish_step()
            if self._check.is_due(self.steps):
                self._exchange.settle()
                self._check.run(self.steps)
            self._reads.leave()
            self._reads.read_aliased()
