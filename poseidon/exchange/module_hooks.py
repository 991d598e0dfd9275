"""Hooks of a module that its copies do not have.

Law: the user's module stays the same object. `copy.deepcopy`, pickle (`torch.save` of a whole
module) and `torch.jit.script` leave the hooks out, so a copy needs no Poseidon. A copy is outside
the exchange: it shares no memory with the tensors that the exchange moves, and sockets and threads
cannot be copied. torch offers no hook for copies. So two of its functions are wrapped: the one that
reduces a module for copies and pickles, and the one that makes a module of TorchScript.

Hooks wait for the network and read clocks, so torch.compile does not trace them: a graph ends
before a hook, and another begins after it. A module that was compiled before it was distributed is
one graph. Hooks of the module that the script calls do the work of its layers' hooks, before it
runs (`uncompiled`).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, SupportsIndex

import torch
import torch.jit._recursive
from torch import nn
from torch._C._dynamo import eval_frame


class OfOneModule:
    """A hook, on the module that it was registered on."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the hook."""
        return self._hook(*arguments, **named)

    def __deepcopy__(self, memo: object) -> OfOneModule:
        """Return a hook that does nothing: a class may copy all attributes of a module by itself,
        as those of torch.nn.utils.parametrize do.
        """
        return OfOneModule(_nothing)


class OutsideOfGraphs(OfOneModule):
    """A hook that torch.compile leaves out of a graph.

    It runs where its module runs without a graph.
    """

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the hook, unless torch.compile makes a graph."""
        return None if torch.compiler.is_dynamo_compiling() else self._hook(*arguments, **named)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def leave_out_of_graphs(function: Any, reason: str) -> None:
    """Let torch.compile trace neither a function nor what it calls.

    What torch.compiler.disable does to a function, without its import, which takes seconds.

    Args:
        reason: what torch says where there may be no break in a graph.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason
    _skip(function)


def _skip(function: Any) -> None:
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)  # also for the frames that it calls
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


leave_out_of_graphs(
    OfOneModule.__call__,
    "a hook of poseidon.distribute; for one graph call torch.compile(module) before distribute()",
)
_skip(OutsideOfGraphs.__call__)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that was passed to `torch.compile`; for a module that is not compiled,
    itself.
    """
    # not imported: nothing has been compiled
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None and isinstance(module, compiler.OptimizedModule):
        inner: nn.Module = module._orig_mod
        return inner
    return module


def _own(state: Mapping[str, Any]) -> dict[int, OfOneModule]:
    """Return Poseidon's hooks among the attributes of a module, by their number."""
    return {
        number: hook
        for name, hooks in state.items()
        if name.endswith("_hooks") and isinstance(hooks, dict)
        for number, hook in hooks.items()
        if isinstance(hook, OfOneModule)
    }


def _without(state: Mapping[str, Any], own: AbstractSet[int]) -> dict[str, Any]:
    """Return the attributes of a module without some of its hooks, and torch's notes on them."""
    return {
        name: OrderedDict((n, h) for n, h in value.items() if n not in own)
        if "_hooks" in name and isinstance(value, dict) and not own.isdisjoint(value)
        else value
        for name, value in state.items()
    }


def _reduce(module: nn.Module, protocol: SupportsIndex) -> Any:
    reduced: Any = object.__reduce_ex__(module, protocol)
    if not (isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict)):
        return reduced
    make, arguments, state, *rest = reduced
    own = _own(state)
    return (make, arguments, _without(state, own.keys()), *rest) if own else reduced


def _copy(module: nn.Module) -> nn.Module:
    """Make a shallow copy, which has the same tensors, so it keeps the hooks."""
    reduced: Any = object.__reduce_ex__(module, 4)
    make, arguments, state, *_ = reduced
    copied: nn.Module = make(*arguments)
    copied.__setstate__(state)
    return copied


def _script(module: nn.Module, *arguments: Any, **named: Any) -> Any:
    """Make a module of TorchScript, which compiles hooks."""
    attributes = [vars(child) for child in module.modules()]
    before = [
        {name: value for name, value in own.items() if "_hooks" in name} for own in attributes
    ]
    try:
        for own, hooks in zip(attributes, before, strict=True):
            own.update(_without(hooks, _own(hooks).keys()))
        return _create_script_module(module, *arguments, **named)
    finally:
        for own, hooks in zip(attributes, before, strict=True):
            own.update(hooks)


nn.Module.__reduce_ex__ = _reduce  # type: ignore[assignment, method-assign]
nn.Module.__copy__ = _copy  # type: ignore[attr-defined]
_recursive: Any = torch.jit._recursive
_create_script_module = _recursive.create_script_module
_recursive.create_script_module = _script
