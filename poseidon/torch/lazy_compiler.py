"""torch's optimizers without torch's compiler, in a script that compiles nothing.

Each optimizer of torch imports `torch._dynamo`, with sympy and half of torch behind it, at its
first call: to keep the compiler out of its methods, and to break the graph that is compiled at its
step. That import takes 2.2 seconds of a processor and 72 MB, twice the time of `import torch`
(torch 2.13), in each worker. torch has no switch for it. Without a compiler both do nothing.

Law: while nothing has imported `torch._dynamo`, a method computes what torch's own method computes;
once something has, it is torch's own. A version of torch with other decorators keeps them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.optim import SGD, Optimizer

COMPILER = "torch._dynamo"
_Method = Callable[..., Any]


def import_compiler_late() -> None:
    """Let torch's optimizers import the compiler only where something else imports it.

    A second call changes nothing.
    """
    disabled = _code_of(Optimizer.zero_grad)
    stepping = _code_of(SGD.step)
    for kind in (Optimizer, *_optimizers()):
        for name, method in list(vars(kind).items()):
            code = _code_of(method)
            if code is not None and code is disabled and code.co_name == "inner":
                setattr(kind, name, _method_of(method))
            elif code is not None and code is stepping and code.co_name == "_use_grad":
                setattr(kind, name, _step_of(method))


def _optimizers() -> list[type[Optimizer]]:
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    return [kind for kind in kinds if issubclass(kind, Optimizer) and kind is not Optimizer]


def _code_of(method: object) -> Any:
    """Return the code of a decorated function, which all functions with the decorator share."""
    return getattr(method, "__code__", None) if hasattr(method, "__wrapped__") else None


def _method_of(torchs: Any) -> _Method:
    """Return a method that torch has decorated with `torch._disable_dynamo`."""
    plain = torchs.__wrapped__

    @wraps(plain)
    def method(*args: Any, **kwargs: Any) -> Any:
        return (torchs if COMPILER in sys.modules else plain)(*args, **kwargs)

    return method


def _step_of(torchs: Any) -> _Method:
    """Return a step that torch has decorated with `_use_grad_for_differentiable`."""
    plain = torchs.__wrapped__

    @wraps(plain)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules:
            return torchs(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *args, **kwargs)

    return step
