"""Copies of a module have no part in what is hooked to it."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from poseidon.exchange.module_hooks import OfOneModule


def deep(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [deep, saved])
def test_a_copy_runs_without_the_hook(copied: Callable[[nn.Module], nn.Module]) -> None:
    module = nn.Linear(2, 2)
    cannot_be_copied = threading.Lock()

    def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with cannot_be_copied:
            return (2 * arguments[0],)

    module.register_forward_pre_hook(OfOneModule(hook))
    again = copied(copied(module))
    x = torch.ones(1, 2)
    torch.testing.assert_close(again(2 * x), module(x))
