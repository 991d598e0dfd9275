"""A torch.optim optimizer that makes a step in the turn of each virtual worker of a process.

Law: a virtual worker finds the optimizer's state as it has left it. The options of parameter groups,
such as the rate, belong to all: a step begins with those before the first turn, and all turns
change them alike.
"""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from poseidon.errors import UsageError

Options = list[dict[str, Any]]
"""The options of each parameter group."""


class OptimizerTurns:
    """The states of an optimizer, between the turns of several virtual workers.

    Args:
        count: of virtual workers, 2 or more. All begin with the optimizer's state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, count: int) -> None:
        self._optimizer = optimizer
        self._states = [
            optimizer.state,
            *(
                defaultdict(dict, {key: deepcopy(own) for key, own in optimizer.state.items()})
                for _ in range(count - 1)
            ),
        ]
        self._at = 0
        self._before: Options = []
        self._after: Options = []

    def enter(self, at: int) -> None:
        """Give the optimizer the state of a virtual worker.

        Args:
            at: its place among the virtual workers of this process.
        """
        self._states[self._at] = self._optimizer.state
        self._optimizer.state = self._states[at]
        self._at = at

    def before_step(self) -> None:
        """Note the options before the step of a turn."""
        if self._at == 0:
            self._before = self._options()

    def after_step(self) -> None:
        """End the step of a turn, and give the optimizer the state of the next one.

        Raises:
            UsageError: steps of two virtual workers have changed an option differently.
        """
        found = self._options()
        if self._at == 0:
            self._after = found
        self._check_alike(found)
        is_last = self._at == len(self._states) - 1
        if not is_last:
            for group, options in zip(self._optimizer.param_groups, self._before, strict=True):
                _restore(group, options)
        self.enter(0 if is_last else self._at + 1)

    def _options(self) -> Options:
        return [
            {key: deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]

    def _check_alike(self, found: Options) -> None:
        for first, own in zip(self._after, found, strict=True):
            for key, value in own.items():
                if not _is_same(first.get(key), value):
                    raise UsageError(
                        f"{type(self._optimizer).__name__} has set '{key}' to {first.get(key)} for "
                        f"one virtual worker and to {value} for another, and its parameter groups "
                        "have one value; expected as many workers as virtual workers"
                    )


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _restore(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Give a parameter group its earlier options. Those that are the same stay as they are."""
    for key in group.keys() - options.keys() - {"params"}:
        del group[key]
    for key, value in options.items():
        if not _is_same(group.get(key), value):
            group[key] = deepcopy(value)
