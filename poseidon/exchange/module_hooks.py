"""Hooks on a module that its copies do not take along.

Law: `copy.deepcopy` and pickle (`torch.save` of a whole module) give the copy a hook that does nothing. A copy is no part of
the exchange: it shares no memory with what the exchange moves, and neither sockets nor threads can be copied.

Hooks wait for the network and look at clocks, so torch.compile does not trace them: a graph ends before one and another
begins behind it. A module that was compiled before it was distributed is one graph: what its layers' hooks would do is done before
it runs, by hooks of what the script calls (`uncompiled`).
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
        hook: what it does there.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Do it."""
        return self._hook(*arguments, **named)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]
    __call__._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "a hook of poseidon.distribute; for one graph call torch.compile(module) before distribute()"
    )

    def __deepcopy__(self, memo: object) -> OfOneModule:
        return idle()

    def __reduce__(self) -> tuple[Callable[[], OfOneModule], tuple[()]]:
        return idle, ()


class OutsideOfGraphs(OfOneModule):
    """A hook that a graph of torch.compile leaves out; where its module runs without one it does what it does."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Do it, unless a graph is made."""
        return None if torch.compiler.is_dynamo_compiling() else self._hook(*arguments, **named)


# What torch.compiler.disable does to a frame, without its import of seconds: dynamo looks into none below these either.
for _code in (OfOneModule.__call__.__code__, OutsideOfGraphs.__call__.__code__):
    eval_frame.set_code_exec_strategy(
        _code, eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    )


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile(module)` was given; any other module is its own."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # not imported: nothing has been compiled
    if compiler is not None and isinstance(module, compiler.OptimizedModule):
        inner: nn.Module = module._orig_mod
        return inner
    return module


def idle() -> OfOneModule:
    """A hook that does nothing."""
    return OfOneModule(_nothing)


def _nothing(*_: object, **__: object) -> None:
    pass
