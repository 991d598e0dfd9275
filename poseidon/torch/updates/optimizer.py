"""torch.optim optimizers: what they have in common on the shards and on the workers, and those whose
rules the shards apply.

Law: where the shards apply the rule, workers keep no state of it. The optimizer stays the script's way
to make a step and to set rates. Its own `step` finds no gradient, because the shards have them all, so
it changes nothing.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poseidon.engine.leaf import Leaf, LeafStage, on_host
from poseidon.errors import SnapshotError, UsageError
from poseidon.torch.group_loop import GroupLoop
from poseidon.torch.optimizer_rules import OptimizerRules
from poseidon.torch.tensors import ModuleTensors
from poseidon.torch.updates.rule import RuleUpdate

CLOSURE = "{}; use an optimizer whose step() uses gradients of backward(), without a closure"


def check_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that makes its own backward passes, such as torch.optim.LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        name = type(optimizer).__name__
        raise UsageError(
            CLOSURE.format(f"{name} runs the loss itself, by the closure of its step()")
        )


def let_be_hooked(optimizer: Optimizer) -> None:
    """Let hooks be registered on an optimizer that wraps a second one, such as a published Lookahead,
    and leaves out `Optimizer.__init__`.
    """
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        optimizer._optimizer_step_pre_hooks = OrderedDict()
        optimizer._optimizer_step_post_hooks = OrderedDict()
        optimizer._patch_step_function()


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
    if not found & {*tensors.exchanged.values(), *tensors.of_tables}:
        raise UsageError("the optimizer has no parameter that requires a gradient")
    return found


def load_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Load the state of an optimizer.

    Raises:
        SnapshotError: it is of a different one.
    """
    with loading():
        optimizer.load_state_dict(state)
    # It has made steps: else a scheduler that comes first, at an epoch's end, warns of a wrong order.
    optimizer._opt_called = True  # type: ignore[attr-defined]


@contextmanager
def loading() -> Iterator[None]:
    """Translate what torch raises of an optimizer's state that does not fit."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"the checkpoint is of a different optimizer: {error}") from error


def refuse_lr(rate: float, label: str) -> None:
    """Refuse a rate for an optimizer, which has its own."""
    raise UsageError(
        f"group.lr was set to {rate} with {label}; set lr in the optimizer's param_groups, or use "
        "a scheduler of torch"
    )


class ShardOptimizerUpdate(RuleUpdate):
    """See `Update`.

    Args:
        optimizers: one or more, of some or all of the module's parameters.
    """

    def __init__(self, optimizers: Sequence[Optimizer], tensors: ModuleTensors) -> None:
        wanted = set()
        for optimizer in optimizers:
            check_closure(optimizer)
            wanted |= exchanged_parameters(optimizer, tensors)
        tensors = tensors.trained_by(wanted)
        names = {parameter: name for name, parameter in tensors.trained.items()}
        self.optimizers = optimizers
        self._stepped: list[Optimizer] = []
        """The optimizers whose `step` was called for the step that has ended last."""
        self._begun_rates: tuple[float, ...] = ()
        super().__init__(OptimizerRules(optimizers, names), tensors)

    def attach(self, loop: GroupLoop) -> None:
        super().attach(loop)
        for optimizer in self.optimizers:
            optimizer.state.clear()  # some make it before their first step
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))

    def set_lr(self, rate: float) -> None:
        refuse_lr(rate, self.label)

    def check_begin(self) -> None:
        super().check_begin()
        self._begun_rates = self.rates()

    def step(self, *, zero_grad: bool) -> bool:
        self.loop.check_open("step")
        self._check_zero_grad(zero_grad)
        self._stepped.clear()
        for optimizer in self.optimizers:
            optimizer.step()
        return self.loop.session.is_first_turn

    def _before_step(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """End the step at the first optimizer's `step`, for all of them."""
        check_no_closure(arguments, named)
        session = self.loop.session
        if not session.passes and self._stepped and optimizer not in self._stepped:
            self._stepped.append(optimizer)
            return
        if session.has_begun and self.rates() != self._begun_rates:
            raise UsageError(
                f"lr has changed from {self._begun_rates} to {self.rates()} since this step's "
                "first forward pass, but the gradients were sent with the old rate; change lr "
                "between optimizer.step() and the next forward pass (before an evaluation call "
                "group.settle(); with virtual workers write `if group.step(): scheduler.step()`)"
            )
        self._end_step()
        self._stepped = [optimizer]

    def _watched(self) -> Iterable[nn.Parameter]:
        return (p for o in self.optimizers for group in o.param_groups for p in group["params"])

    def leaves(self) -> Sequence[Leaf]:
        states = Leaf.shared(
            "optimizers",
            lambda: [on_host(optimizer.state_dict()) for optimizer in self.optimizers],
            self._load_optimizers,
            stage=LeafStage.UPDATE,
        )
        return [states, *super().leaves()]

    def _load_optimizers(self, states: Sequence[Any]) -> None:
        with loading():
            for optimizer, saved in zip(self.optimizers, states, strict=True):
                load_optimizer(optimizer, saved)
