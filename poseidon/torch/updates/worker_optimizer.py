"""A torch.optim optimizer on every worker, on gradients that are the mean over all workers.

Law: the optimizer sees in `parameter.grad` what it would see in one process with the whole batch.
All workers start with equal parameters and the optimizer is deterministic, so the parameters stay
equal.

The exchange does not hold the parameter but a tensor of its shape, whose next value is the mean
gradient (`RuleKind.MEAN`). Its first value is the parameter itself, so rank 0's parameters reach
all workers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from poseidon.base.call_names import STEP
from poseidon.engine.leaf import Found, Leaf, LeafStage
from poseidon.engine.loop_table import Applies, LoopEvent, State
from poseidon.errors import UsageError
from poseidon.exchange.base import like_shard, local_of
from poseidon.torch.divided_states import of_optimizer, shared_leaf
from poseidon.torch.group_loop import GroupLoop
from poseidon.torch.module_watch import SentGradients
from poseidon.torch.tensors import ModuleTensors
from poseidon.torch.updates.group_update import GroupUpdate
from poseidon.torch.updates.optimizer import (
    check_closure,
    check_no_closure,
    exchanged_parameters,
    let_be_hooked,
    load_optimizer,
    loading,
    refuse_lr,
)

UNSCALED = (
    "a GradScaler has read or changed this worker's gradients after backward() had sent them; "
    "call average_gradients() between backward() and GradScaler's unscale_() or step()"
)


class WorkerOptimizerUpdate(GroupUpdate):
    """What updates by an optimizer of the worker have in common. See `Update`.

    Args:
        optimizer: of some or all of the module's parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, tensors: ModuleTensors) -> None:
        check_closure(optimizer)
        let_be_hooked(optimizer)
        exchange = tensors.context.member.options
        if exchange.staleness and not exchange.local_steps:
            raise UsageError(
                "a torch.optim optimizer on the workers needs --staleness=0, not "
                f"{exchange.staleness}; or use a rule such as poseidon.SGD"
            )
        self.optimizer = optimizer
        self.label = f"torch.optim.{type(optimizer).__name__}"
        self._rates_at_first: list[Any] = []
        """The rates of the parameter groups at the end of an iteration's first turn."""
        self._tensors = tensors.trained_by(exchanged_parameters(optimizer, tensors))
        """Of which only the optimizer's parameters are trained."""
        self._trains = {*self._tensors.trained.values(), *tensors.of_tables}

    def attach(self, loop: GroupLoop) -> None:
        super().attach(loop)
        self._note_rest()
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def set_lr(self, rate: float) -> None:
        refuse_lr(rate, self.label)

    def step(self, *, zero_grad: bool) -> bool:
        loop = self.loop
        loop.check_open("step")
        if loop.context.member.takes_turns and not zero_grad:
            raise UsageError(
                "step(zero_grad=False) keeps the gradients for the next pass, which belongs to a "
                "different virtual worker; call step(), or start as many workers as virtual "
                "workers"
            )
        with loop.collections.calling(STEP):
            self.optimizer.step()
        if zero_grad:
            loop.exchanged.module.zero_grad()
        return loop.session.is_first_turn

    def _before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        check_no_closure(arguments, named)
        self._check_trained(optimizer)
        # set by GradScaler, of this worker alone
        self._begin_step(is_scaled=getattr(optimizer, "found_inf", None) is not None)

    @abstractmethod
    def _begin_step(self, *, is_scaled: bool) -> None:
        """Bring the gradients that the optimizer uses.

        Args:
            is_scaled: whether a GradScaler may leave the step out on this worker alone.
        """

    @abstractmethod
    def _after_step(self, *_: object) -> None:
        """End the step."""

    def _note_rest(self) -> None:
        self._versions = {
            p: p._version for p in self.plan.rest.values() if isinstance(p, nn.Parameter)
        }

    def _check_trained(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to train parameters that are not exchanged: they would differ between workers."""
        own = (
            p for group in optimizer.param_groups for p in group["params"] if p not in self._trains
        )
        moved = (p for p, version in self._versions.items() if p._version != version)
        for parameter in (*own, *moved):
            if parameter.requires_grad and parameter.grad is not None:
                raise UsageError(
                    f"{self.name_of(parameter)} is trained, but when distribute() was called it "
                    "required no gradient, or the optimizer did not have it, so each worker "
                    "would train it alone; give one optimizer all parameters that are ever "
                    "trained, and freeze them after distribute()"
                )

    def _check_rates(self) -> None:
        """Refuse a scheduler's step between two turns of a step."""
        rates = [group.get("lr") for group in self.optimizer.param_groups]
        if self.loop.session.is_first_turn:
            self._rates_at_first = [r.clone() if isinstance(r, Tensor) else r for r in rates]
        elif rates != self._rates_at_first:
            raise UsageError(
                f"lr has changed from {self._rates_at_first} to {rates} between two virtual "
                "workers of a step; write `if group.step(): scheduler.step()`"
            )


class MeanOptimizerUpdate(WorkerOptimizerUpdate):
    """An optimizer on mean gradients. See `Update`."""

    def __init__(self, optimizer: torch.optim.Optimizer, tensors: ModuleTensors) -> None:
        super().__init__(optimizer, tensors)
        member, trained = tensors.context.member, self._tensors.trained
        self.applies = Applies.TURNS if member.takes_turns else Applies.WORKERS
        self._means: dict[nn.Parameter, nn.Parameter] = {}
        self._are_means_in_place = False
        self._has_left = False
        """Whether the optimizer's step under way has only ended a turn."""
        self._sent = SentGradients(member, UNSCALED)

        def new_mean(name: str) -> Tensor:
            mean = nn.Parameter(_copy(trained[name]), requires_grad=False)
            self._means[trained[name]] = mean
            return mean

        self.plan = self._tensors.plan(None, new_mean)

    def attach(self, loop: GroupLoop) -> None:
        self._take_first()
        super().attach(loop)

    def _take_first(self) -> None:
        """Set the parameters to the first values of the means, which are rank 0's parameters."""
        with torch.no_grad():
            for parameter, mean in self._means.items():
                local_of(parameter).copy_(mean)

    # What to send.

    def check_backward(self) -> None:
        """Give gradients that the script has kept, or set to zero in place, memory of their own:
        means arrive in the exchange's, which may be while the script clears its gradients.
        """
        if not self._are_means_in_place:
            return
        self._are_means_in_place = False
        for parameter, mean in self._means.items():
            gradient = parameter.grad
            if gradient is not None and local_of(gradient).data_ptr() == mean.data_ptr():
                parameter.grad = gradient.clone()

    def pass_ended(self) -> None:
        self._sent.note(reversed(self._means))

    def forget(self) -> None:
        self._sent.forget()

    # How to apply.

    def average_gradients(self) -> bool:
        if self.plan.tables:
            raise UsageError(
                f"average_gradients() cannot be used with table '{self.plan.tables[0].spec.name}', "
                "whose shards apply its gradients as they are; call step() right after backward()"
            )
        return self._average()

    def _average(self) -> bool:
        """Average the gradients, or end a turn within the step. Return whether they are means."""
        loop = self.loop
        loop.check_step(LoopEvent.AVERAGE)
        loop.exchanged.hooks.check_unchanged()
        self._sent.check()
        self._check_rates()
        if loop.leave_turn():
            return False
        with loop.collections.calling("average_gradients"):
            loop.on(LoopEvent.AVERAGE)
        self._are_means_in_place = True
        for parameter, mean in self._means.items():
            # A parameter that has been frozen since is left alone, as in one process.
            gradient = like_shard(_in_order_of(parameter, mean), parameter)
            parameter.grad = gradient if parameter.requires_grad else None
        return True

    def _begin_step(self, *, is_scaled: bool) -> None:
        if self.loop.session.state is not State.MEANS:
            if is_scaled:
                raise UsageError(UNSCALED)
            with self.loop.collections.calling(STEP):
                self._has_left = not self._average()

    def _after_step(self, *_: object) -> None:
        if self._has_left:  # it has found no gradient
            self._has_left = False
            return
        self.loop.end_step(LoopEvent.APPLY, also_first=True)

    # Which state.

    def leaves(self) -> Sequence[Leaf]:
        state = shared_leaf(
            "optimizer",
            self.optimizer.state_dict,
            is_divided=bool(self.plan.shards),
            stage=LeafStage.UPDATE,
            write=self._load_state,
        )
        return [state]

    def _load_state(self, found: Found) -> None:
        """Load the optimizer's state: the shared one, or the first worker's."""
        state = found.each[0] if found.shared is None else found.shared
        if self.plan.shards:
            with loading():
                state = of_optimizer(state, self.optimizer)
        load_optimizer(self.optimizer, state)

    def replicated(self) -> Mapping[str, Tensor]:
        names = {
            parameter: name for name, parameter in self.loop.exchanged.module.named_parameters()
        }
        found: dict[str, Tensor] = {}
        for parameter in self._means:
            found[names[parameter]] = local_of(parameter)
            state = self.optimizer.state.get(parameter, {})
            found |= {
                f"{names[parameter]}, {key}": local_of(v)
                for key, v in state.items()
                if isinstance(v, Tensor)
            }
        return found

    def reopen(self) -> None:
        with torch.no_grad():
            for parameter, mean in self._means.items():
                mean.copy_(local_of(parameter))
        self.loop.exchanged.exchange.open(None, self.loop.session.iterations)
        self._take_first()
        self._note_rest()


def _in_order_of(parameter: nn.Parameter, mean: nn.Parameter) -> Tensor:
    """Return a mean in the parameter's type and order in memory: fused optimizers take all their
    tensors to have one order.
    """
    own, found = local_of(parameter), mean.data.to(parameter.dtype)
    return found if own.is_contiguous() else torch.empty_like(own).copy_(found)


def _copy(tensor: Tensor) -> Tensor:
    return local_of(tensor).detach().float().clone(memory_format=torch.contiguous_format)
