"""Hooks of a module that do nothing in its copies.

Law: `copy.deepcopy` and pickle (`torch.save` of a whole module) give the copy a hook that does
nothing. A copy is outside the exchange: it shares no memory with the tensors that the exchange
moves, and sockets and threads cannot be copied.

Hooks wait for the network and read clocks, so torch.compile does not trace them: a graph ends
before a hook, and another begins after it. A module that was compiled before it was distributed is
one graph. Hooks of the module that the script calls do the work of its layers' hooks, before it
runs (`uncompiled`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._dynamo import eval_frame


class OfOneModule:
    """A hook, on the module that it was registered on.

    Args:
        on_copy: called before the module is copied.
    """

    def __init__(
        self, hook: Callable[..., Any], on_copy: Callable[[], None] = lambda: None
    ) -> None:
        self._hook = hook
        self._on_copy = on_copy

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the hook."""
        return self._hook(*arguments, **named)

    def __deepcopy__(self, memo: object) -> OfOneModule:
        self._on_copy()
        return idle()

    def __reduce__(self) -> tuple[Callable[[], OfOneModule], tuple[()]]:
        self._on_copy()
        return idle, ()


class OutsideOfGraphs(OfOneModule):
    """A hook that torch.compile leaves out of a graph.

    It runs where its module runs without a graph.
    """

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the hook, unless torch.compile makes a graph."""
        return None if torch.compiler.is_dynamo_compiling() else self._hook(*arguments, **named)


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


def idle() -> OfOneModule:
    """Return a hook that does nothing."""
    return OfOneModule(_nothing)


def _nothing(*_: object, **__: object) -> None:
    pass
