"""Which weights of a module may travel as sufficient factors, and the rows of their factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from poseidon.exchange.factors.taps import hooks_on, layers_with_factors

Example = Tensor | Sequence[Any] | Mapping[str, Any]
"""The module's input, its positional arguments, or its arguments by name."""


def rows_by_batch_size(module: nn.Module, batch_size: int) -> dict[nn.Parameter, int]:
    """Return the rows of the factors of each fully-connected weight, if all layers see one row a
    record.

    A layer whose own forward pass does not run (inside torch.nn.MultiheadAttention) is a subclass,
    and left out.
    """
    return {
        weight: batch_size for weight, layer in _layers(module).items() if type(layer) is nn.Linear
    }


def rows_by_example(module: nn.Module, example: Example) -> dict[nn.Parameter, int]:
    """Return the rows of the factors of each fully-connected weight, found by one run without
    gradients.

    Weights whose layer runs never or more than once are left out, and those that are used outside
    their layer. Dropout, statistics and random numbers stay as they were.
    """
    uses = [_Use(weight, layer) for weight, layer in _layers(module).items()]
    try:
        with _NotingUses(uses):
            _run(module, example)
    finally:
        for use in uses:
            use.close()
    return {use.weight: use.rows[0] for use in uses if len(use.rows) == 1 and not use.used_outside}


def _layers(module: nn.Module) -> dict[nn.Parameter, nn.Module]:
    """Return the layers whose weights may travel as factors.

    A user's hook on a weight needs its whole gradient.
    """
    found = layers_with_factors(module)
    return {weight: layer for weight, layer in found.items() if not hooks_on(weight)}


class _Use:
    """The uses of one weight while its module runs on an example.

    Attributes:
        rows: rows of each run of its own layer.
        used_outside: True if anything is computed from it outside these runs.
    """

    def __init__(self, weight: nn.Parameter, layer: nn.Module) -> None:
        self.weight = weight
        self.rows: list[int] = []
        self.used_outside = False
        self._running = False
        self._handles = [
            layer.register_forward_pre_hook(self._enter),
            layer.register_forward_hook(self._leave),
        ]

    def note(self) -> None:
        """Note that something is computed from the weight."""
        self.used_outside = self.used_outside or not self._running

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._running = True
        self.rows.append(arguments[0].numel() // max(1, arguments[0].shape[-1]))

    def _leave(self, *_: object) -> None:
        self._running = False


class _NotingUses(TorchFunctionMode):
    """Reports all functions that compute a tensor from a weight to the weight's `_Use`."""

    def __init__(self, uses: Sequence[_Use]) -> None:
        super().__init__()
        self._uses: dict[Tensor, _Use] = {use.weight: use for use in uses}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(True for _ in tensors_in(result)):
            for tensor in tensors_in((args, kwargs)):
                if tensor in self._uses:
                    self._uses[tensor].note()
        return result


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors of nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def _run(module: nn.Module, example: Example) -> None:
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            run_example(module, example)
    finally:
        for child, training in modes:
            child.training = training


def run_example(module: nn.Module, example: Example) -> object:
    """Return the module's output for an example."""
    if isinstance(example, Mapping):
        return module(**example)
    return module(example) if isinstance(example, Tensor) else module(*example)
