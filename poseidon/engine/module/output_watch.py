"""Hears of a backward pass as soon as it reaches a module's outputs.

Law: it hears of `backward()`, which brings gradients to the module's parameters, and not of `torch.autograd.grad`, which does not.
A checkpoint's own backward pass (`use_reentrant=True`) lies within the one that was heard of before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from poseidon.exchange.module_hooks import OfOneModule


class OutputWatch:
    """The hook on one module.

    Args:
        module: the module.
        parameters: those of it that want a gradient.
        begins: told within each backward pass, once for each output.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[Tensor], begins: Callable[[], None]) -> None:
        self._begins = begins
        self._leaves = [get_gradient_edge(parameter).node for parameter in parameters]
        self._handle = module.register_forward_hook(OfOneModule(self._watch))

    def close(self) -> None:
        """Take the hook off."""
        self._handle.remove()
        self._leaves.clear()

    def _watch(self, module: nn.Module, arguments: object, outputs: object) -> None:
        for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(self._reached)

    def _reached(self, _: Tensor) -> None:
        if self._goes_on_to_parameters():
            self._begins()

    def _goes_on_to_parameters(self) -> bool:
        try:
            return any(torch._C._will_engine_execute_node(leaf) for leaf in self._leaves)
        except RuntimeError:  # torch cannot tell of parameters that torch.autograd.grad is asked about
            return False
