"""Training by a torch.optim optimizer: it runs on every worker, on gradients that are the mean
over all workers.

Law: the optimizer sees in `parameter.grad` what it would see in one process with the whole batch.
All workers start with equal parameters and the optimizer is deterministic, so the parameters stay
equal.

The exchange does not hold the parameter but a tensor of its shape, whose next value is the mean
gradient (`RuleKind.MEAN`). Its first value is the parameter itself, so rank 0's parameters reach
all workers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.base import Trained
from poseidon.torch.checkpoint_file import on_host
from poseidon.torch.group import Group
from poseidon.torch.masters import as_float32
from poseidon.torch.sent_gradients import SentGradients
from poseidon.torch.tensors import DistributeOptions, GroupPlan, ModuleTensors
from poseidon.torch.worker_context import STEP, WorkerContext
from ps_server import Rule, RuleKind

CLOSURE = "{}; expected an optimizer whose step() uses gradients of backward(), without a closure"
UNSCALED = (
    "a GradScaler has read or changed this worker's gradients after backward() had sent them; "
    "expected average_gradients() between backward() and GradScaler's unscale_() or step()"
)


class OptimizerGroup(Group):
    """A group whose parameters follow a torch.optim optimizer on every worker. See `Group`.

    Args:
        optimizer: of some or all of its parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        tensors: ModuleTensors,
        options: DistributeOptions,
        context: WorkerContext,
    ) -> None:
        check_closure(optimizer)
        if context.member.options.staleness and not context.member.options.local_steps:
            raise UsageError(
                "an optimizer runs on the workers and needs every gradient at once; expected "
                "--staleness=0, "
                f"not {context.member.options.staleness}, or a rule such as poseidon.SGD"
            )
        self._optimizer = optimizer
        self._means: dict[nn.Parameter, nn.Parameter] = {}
        self._averaged = self._averaged_in_place = False
        self._has_left = False
        """Whether the optimizer's step under way has only ended a turn."""
        self._rates_at_first: list[Any] = []
        """The rates of the parameter groups at the end of an iteration's first turn."""
        self._optimizer_hooks: list[RemovableHandle] = []
        self._sent = SentGradients(context, UNSCALED)
        super().__init__(module, self._make_plan(tensors, options), context)
        self._take_first()
        self._optimizer_hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def _make_plan(self, tensors: ModuleTensors, options: DistributeOptions) -> GroupPlan:
        wanted = exchanged_parameters(self._optimizer, tensors)
        exchanged, sources = [], []
        rest = dict(tensors.rest)
        for name, tensor in tensors.exchanged.items():
            if not isinstance(tensor, nn.Parameter):
                exchanged.append(Trained(name=name, tensor=as_float32(tensor), statistics=True))
                sources.append(tensor)
            elif tensor in wanted:
                mean = self._means[tensor] = nn.Parameter(_copy(tensor), requires_grad=False)
                rule = Rule(kind=RuleKind.MEAN)
                factor_rows = tensors.rows.get(tensor, 0) * options.passes
                exchanged.append(
                    Trained(
                        name=name,
                        tensor=mean,
                        rule=rule,
                        factor_rows=factor_rows,
                        looked_up=tensor in tensors.looked_up,
                    )
                )
                sources.append(tensor)
            else:
                rest[name] = tensor
        return GroupPlan(
            tensors=exchanged,
            sources=sources,
            rest=rest,
            clip=options.clip,
            passes=options.passes,
            tables=tensors.tables,
        )

    def _take_first(self) -> None:
        """Set the parameters to the first values of the means, which are rank 0's parameters."""
        with torch.no_grad():
            for parameter, mean in self._means.items():
                parameter.copy_(mean)
        self._versions = {
            p: p._version for p in self._plan.rest.values() if isinstance(p, nn.Parameter)
        }

    def _save_how(self) -> dict[str, Any]:
        return {"optimizer": on_host(self._optimizer.state_dict())}

    def _replicated(self) -> dict[str, Tensor]:
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        found: dict[str, Tensor] = {}
        for parameter in self._means:
            found[names[parameter]] = parameter
            state = self._optimizer.state.get(parameter, {})
            found |= {
                f"{names[parameter]}, {key}": v for key, v in state.items() if isinstance(v, Tensor)
            }
        return found

    def _load_how(self, state: Mapping[str, Any]) -> None:
        try:
            self._load_optimizer(state)
        except (ValueError, KeyError, TypeError) as error:
            raise SnapshotError(f"the checkpoint is of a different optimizer: {error}") from error
        # It has made steps: else a scheduler that comes first, at an epoch's end, warns of a wrong
        # order.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self._open_again(state)
        self._take_first()

    def _load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Load the optimizer's state of a checkpoint: the shared one, or the first worker's."""
        of_all = state.get("optimizer")
        self._optimizer.load_state_dict(state["own"][0]["optimizer"] if of_all is None else of_all)

    def _open_again(self, state: Mapping[str, Any]) -> None:
        """Open the exchange with the parameters of a checkpoint, which are loaded."""
        with torch.no_grad():
            for parameter, mean in self._means.items():
                mean.copy_(parameter)
        self._exchange.open(None, state["iterations"])

    def close(self) -> None:
        for handle in self._optimizer_hooks:
            handle.remove()
        self._optimizer_hooks = []
        super().close()

    @property
    def _how(self) -> str:
        return f"torch.optim.{type(self._optimizer).__name__}"

    def step(self, *, zero_grad: bool = True) -> bool:
        """Call the optimizer's own `step`, and clear the gradients. See `Group`.

        A script may call the optimizer's `step` and `zero_grad` instead.
        """
        self._check_open("step")
        if self._turns.several and not zero_grad:
            raise UsageError(
                "step(zero_grad=False) keeps the gradients for the next pass, which is another "
                "virtual worker's; expected step(), or as many workers as virtual workers"
            )
        with self._collections.calling(STEP):
            self._optimizer.step()
        if zero_grad:
            self._module.zero_grad()
        return self._turns.is_first

    def _on_gradient(self, parameter: Tensor | None = None) -> None:
        if not self._in_backward and self._averaged_in_place:
            self._separate_gradients()
        super()._on_gradient(parameter)

    def _separate_gradients(self) -> None:
        """Give gradients that the script has kept, or set to zero in place, memory of their own:
        means arrive in the exchange's, which may be while the script clears its gradients.
        """
        self._averaged_in_place = False
        for parameter, mean in self._means.items():
            gradient = parameter.grad
            if gradient is not None and gradient.data_ptr() == mean.data_ptr():
                parameter.grad = gradient.clone()

    def _take_back(self) -> None:
        """End the iteration, whose means no step uses."""
        if self._turns.several:
            super()._take_back()
        with self._collections.calling(STEP):
            self._hooks.abandon()
            self._finish_iteration()

    def _forget_stale(self) -> None:
        if self._passes and self._context.loops.several:
            self._forget_passes()

    def average_gradients(self) -> bool:
        """Set every `grad` to the mean over all workers now, for a loop that reads gradients
        before the optimizer does.

        Returns:
            Whether they are the means. If not, another virtual worker of this process is next, and
            there are no gradients for the optimizer yet.

        Raises:
            UsageError: there was no backward pass, or there are tables, whose gradients leave with
                the optimizer's step.
        """
        if self._plan.tables:
            raise UsageError(
                f"average_gradients() with table '{self._plan.tables[0].spec.name}', whose shards "
                "apply its gradients as they are; expected step() right after backward()"
            )
        return self._average()

    def _average(self) -> bool:
        """Average the gradients, or end a turn within the step. Return whether they are means."""
        self._check_passes()
        self._hooks.check_unchanged()
        self._sent.check()
        self._check_rates()
        if self._leave_turn():
            return False
        with self._collections.calling("average_gradients"):
            self._end_iteration()
            self._begin()
            self._hooks.wait()
        self._settled = self._averaged = self._averaged_in_place = True
        for parameter, mean in self._means.items():
            # A parameter that has been frozen since is left alone, as in one process.
            parameter.grad = mean.data.to(parameter.dtype) if parameter.requires_grad else None
        return True

    def _check_rates(self) -> None:
        """Refuse a scheduler's step between two turns of a step."""
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        if self._turns.is_first:
            self._rates_at_first = [r.clone() if isinstance(r, Tensor) else r for r in rates]
        elif rates != self._rates_at_first:
            raise UsageError(
                f"lr has changed from {self._rates_at_first} to {rates} between two virtual "
                "workers of a step; expected `if group.step(): scheduler.step()`"
            )

    def _backward_is_over(self) -> None:
        super()._backward_is_over()
        self._sent.note(reversed(self._means))

    def _check_unknown(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to train parameters that are not exchanged: they would differ between workers."""
        known = {*self._means, *self._plan.rest_of_tables}
        own = (p for group in optimizer.param_groups for p in group["params"] if p not in known)
        moved = (p for p, version in self._versions.items() if p._version != version)
        for parameter in (*own, *moved):
            if parameter.requires_grad and parameter.grad is not None:
                raise UsageError(
                    f"{self._name(parameter)} is trained, but when distribute() was called it "
                    "wanted no gradient, or the optimizer did not have it, so each worker would "
                    "train its own; expected one optimizer with all parameters that are ever "
                    "trained, which may be frozen after distribute()"
                )

    def _before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._check_step(optimizer, arguments, named)
        if self._passes or not self._averaged:
            # set by GradScaler, of this worker alone
            if getattr(optimizer, "found_inf", None) is not None:
                raise UsageError(UNSCALED)
            with self._collections.calling(STEP):
                self._has_left = not self._average()

    def _check_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        check_no_closure(arguments, named)
        self._check_unknown(optimizer)

    def _after_step(
        self, optimizer: object, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        if self._has_left:  # it has found no gradient
            self._has_left = False
            return
        with self._collections.calling(STEP):
            self._averaged = False
            self._collections.finish_step()
            if self._check.is_due(self.steps, also_first=True):
                self._check.run(self.steps)

    def _place(self) -> str:
        if self._averaged:
            return f"in step {self.steps + 1}, after average_gradients()"
        return super()._place()


def check_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that makes its own backward passes, such as torch.optim.LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        name = type(optimizer).__name__
        raise UsageError(
            CLOSURE.format(f"{name} runs the loss itself, by the closure of its step()")
        )


def check_no_closure(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Refuse the arguments of an optimizer's `step` where one is a closure."""
    if any(value is not None for value in (*arguments[1:], named.get("closure"))):
        raise UsageError(CLOSURE.format("step() was given a closure, which runs the loss itself"))


def exchanged_parameters(optimizer: torch.optim.Optimizer, tensors: ModuleTensors) -> set[Tensor]:
    """Return the parameters of an optimizer, all of which must be the module's."""
    found = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    strange = found - set(tensors.exchanged.values()) - set(tensors.rest.values())
    if strange:
        raise UsageError(
            f"{len(strange)} of the optimizer's {len(found)} parameters are not the module's; "
            "expected one module that holds all of them"
        )
    of_tables = {parameter for table in tensors.tables for parameter in table.module.parameters()}
    if not found & {*tensors.exchanged.values(), *of_tables}:
        raise UsageError("the optimizer has no parameter that wants a gradient: nothing to train")
    return found


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().float().clone(memory_format=torch.contiguous_format)
