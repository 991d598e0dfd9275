"""A torch.optim optimizer with local steps: it runs on this worker's own gradients, and workers
exchange once a round.

Law: between the ends of two rounds a worker trains as in a process of its own: `grad` is this
worker's gradient, which a script may read and change. `step` returns at the end of a round with the
values that all workers have.

Where a process has several virtual workers, the optimizer makes a step in the turn of each
(`own_states.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from poseidon.base.call_names import STEP
from poseidon.engine.leaf import Found, Leaf, LeafStage, Scope, first, mapped, on_host
from poseidon.engine.loop_table import Applies, LoopEvent
from poseidon.errors import UsageError
from poseidon.exchange.base import local_of
from poseidon.exchange.device import device_of
from poseidon.exchange.options import ExchangeOptions
from poseidon.torch.divided_states import leaf_of_named, leaf_of_parts, of_optimizer, parts, whole
from poseidon.torch.group_loop import GroupLoop
from poseidon.torch.own_states import OwnOptimizerStates
from poseidon.torch.shards import sum_over_host
from poseidon.torch.tensors import ModuleTensors
from poseidon.torch.updates.optimizer import load_optimizer
from poseidon.torch.updates.worker_optimizer import WorkerOptimizerUpdate
from ps_server.rules import clip_factor, norm_limit, plain_sum, sum_of_squares


def is_synchronous(how: object, clip: float | None, exchange: ExchangeOptions) -> bool:
    """Return whether local steps of an optimizer are synchronous training
    (`poseidon.exchange.rounds.local_steps`).
    """
    return (
        type(how) is torch.optim.SGD
        and all(group["momentum"] == 0 for group in how.param_groups)
        and clip is None
        and exchange.one_plain_step
    )


class LocalOptimizerUpdate(WorkerOptimizerUpdate):
    """An optimizer with local steps. See `Update`."""

    applies = Applies.ROUNDS

    def __init__(self, optimizer: torch.optim.Optimizer, tensors: ModuleTensors) -> None:
        super().__init__(optimizer, tensors)
        own = replace(self._tensors, rows={}, looked_up=frozenset())
        exchanged = own.exchanged
        coarse = next((n for n, t in exchanged.items() if t.dtype is not torch.float32), None)
        if coarse is not None:
            raise UsageError(
                f"'{coarse}' is {exchanged[coarse].dtype}, and local steps of a torch optimizer "
                "exchange parameters of torch.float32; expected these, or a rule"
            )
        self._named = exchanged
        self._parameters = [*own.trained.values()]
        self.plan = own.plan(None, lambda name: local_of(exchanged[name]), sends_gradients=False)

    def attach(self, loop: GroupLoop) -> None:
        super().attach(loop)
        self._histories = loop.exchanged.leaves(loop.tree.own, self.label)

    @cached_property
    def _own(self) -> OwnOptimizerStates:
        return OwnOptimizerStates(self.optimizer, len(self.loop.tree.own))

    # How to apply.

    def average_gradients(self) -> bool:
        """Do nothing: with local steps a step uses the gradients of this worker."""
        self.loop.check_step(LoopEvent.OPTIMIZE)
        return True

    def _begin_step(self, *, is_scaled: bool) -> None:
        if is_scaled:
            raise UsageError(
                "a GradScaler may skip a step on one worker, but with local steps all workers "
                "must make the same number; use bfloat16 autocast, which needs no GradScaler"
            )
        self._check_rates()
        self.loop.check_step(LoopEvent.OPTIMIZE)
        self.loop.on(LoopEvent.OPTIMIZE)
        if self.plan.options.clip is not None:
            self._clip(self.plan.options.clip)
        self._own.before_step()

    def _clip(self, clip: float) -> None:
        """Limit the norm of this worker's gradients. The script waits for a device only where a
        module is divided.
        """
        gradients = [local_of(p.grad) for p in self._parameters if p.grad is not None]
        if gradients and not (self.plan.shards or device_of(gradients[0].device).is_host):
            torch._foreach_mul_(gradients, norm_limit(gradients, clip).float())
            return
        squares = plain_sum(map(sum_of_squares, gradients))
        if self.plan.shards:
            squares = sum_over_host(squares, self._parameters[0])
        factor = clip_factor(squares, clip)
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    def _after_step(self, *_: object) -> None:
        loop = self.loop
        self._own.after_step()
        if loop.leave_turn():
            return
        loop.end_step(LoopEvent.STEP, settles=True)
        loop.exchanged.reads.leave()
        with loop.collections.calling(STEP):
            loop.exchanged.reads.read_aliased()

    # Which state.

    def leaves(self) -> Sequence[Leaf]:
        states = Leaf(
            name="optimizer",
            scope=Scope.VIRTUAL,
            stage=LeafStage.UPDATE,
            read=lambda: [self._state() for _ in self.loop.tree.each()],
            enter=self._enter,
            write=self._load_states,
            resize=first,
        )
        outer, member = self._histories.outer(splits=True), self.loop.context.member
        if not self.plan.shards:
            return [states, outer]
        like = {trained.name: self._named[trained.name] for trained in self.plan.shards[0]}
        states = leaf_of_parts(
            states,
            lambda state, keeps: whole(state, keeps=keeps),
            lambda state: of_optimizer(state, self.optimizer),
            parts,
            member,
        )

        def missing(_: str, none: Tensor, own: Mapping[str, Any]) -> list[Tensor]:
            return [none] * max(map(len, own.values()), default=0)

        return [states, leaf_of_named(outer, like, missing, member)]

    def replicated(self) -> Mapping[str, Tensor]:
        return self._histories.replicated()

    def _state(self) -> Any:
        state = self.optimizer.state_dict()
        # the tensors of one that is divided are on one host only together
        return mapped(state, torch.clone) if self.plan.shards else on_host(state)

    def _enter(self, at: int) -> None:
        self._own.enter(at)

    def _load_states(self, found: Found) -> None:
        for at, _ in enumerate(self.loop.tree.each()):
            load_optimizer(self.optimizer, deepcopy(found.mine[at] if found.mine else found.shared))

    def reopen(self) -> None:
        self.loop.exchanged.exchange.open(self._histories.loaded(), self.loop.session.iterations)
        self._note_rest()
