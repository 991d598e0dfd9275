"""What torch.optim optimizers have in common, on the shards and on the workers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from poseidon.errors import SnapshotError, UsageError
from poseidon.torch.tensors import ModuleTensors

CLOSURE = "{}; expected an optimizer whose step() uses gradients of backward(), without a closure"


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
        f"group.lr was set to {rate} under {label}; expected lr of the optimizer's "
        "param_groups, or a scheduler of torch"
    )
