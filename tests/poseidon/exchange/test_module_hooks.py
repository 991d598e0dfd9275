"""Copies of a module, and modules of TorchScript, have no part in what is hooked to it."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from poseidon.exchange.module_hooks import OfOneModule


def deep(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def scripted(module: nn.Module) -> nn.Module:
    result: nn.Module = torch.jit.script(module)
    return result


def hooked(hook: Callable[..., object]) -> nn.Sequential:
    module = nn.Sequential(nn.Linear(2, 2))
    for child in module.modules():
        own = OfOneModule(hook)
        child.register_forward_pre_hook(own, with_kwargs=True)
        child.register_forward_hook(own, prepend=True, with_kwargs=True, always_call=True)
        child.register_state_dict_pre_hook(own)
    return module


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("copied", [deep, saved, scripted])
def test_a_copy_is_without_the_hooks(copied: Callable[[nn.Module], nn.Module]) -> None:
    cannot_be_copied, calls = threading.Lock(), []

    def hook(*_: object) -> None:
        with cannot_be_copied:
            calls.append(0)

    module = hooked(hook)
    again = copied(module)
    x = torch.ones(1, 2)
    expected = again(x)
    again.state_dict()
    assert not calls
    torch.testing.assert_close(module(x), expected)
    assert len(calls) == 4
    for name, value in vars(again).items():
        assert "_hooks" not in name or not value


def test_what_is_pickled_names_no_poseidon() -> None:
    module = hooked(lambda *_: None)
    module.register_forward_hook(kept)
    file = io.BytesIO()
    torch.save(module, file)
    assert b"OfOneModule" not in file.getvalue()
    assert list(saved(module)._forward_hooks.values()) == [kept]


def kept(module: nn.Module, arguments: object, output: Tensor) -> None:
    """A hook of the user's."""


def test_a_shallow_copy_has_the_tensors_and_the_hooks() -> None:
    calls: list[object] = []
    module = hooked(lambda *_: calls.append(0))
    again = copy.copy(module)
    again(torch.ones(1, 2))
    assert len(calls) == 4
    assert again[0] is module[0]


def test_a_copy_of_a_class_that_copies_its_attributes_has_hooks_that_do_nothing() -> None:
    calls: list[object] = []
    lock = threading.Lock()
    module = weight_norm(nn.Linear(2, 2))
    assert "__deepcopy__" in vars(type(module))
    module.register_forward_pre_hook(OfOneModule(lambda *_: calls.append(lock)))
    again = copy.deepcopy(module)
    x = torch.ones(1, 2)
    expected = again(x)
    assert not calls
    torch.testing.assert_close(module(x), expected)
    assert calls == [lock]
