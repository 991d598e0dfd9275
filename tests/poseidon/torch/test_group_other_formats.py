"""A module is saved and loaded by torch.distributed.checkpoint and safetensors, right after a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from poseidon.torch.group import Group
from poseidon.torch.update_rules import SGD
from tests.support.module_groups import assert_same, build, loop, together

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is of the extra export")


def by_checkpoint(module: nn.Module, folder: Path) -> Callable[[nn.Module], object]:
    state = get_model_state_dict(module)
    dcp.save({"model": state}, checkpoint_id=folder, no_dist=True)

    def load(other: nn.Module) -> None:
        found = {"model": get_model_state_dict(other)}
        dcp.load(found, checkpoint_id=folder, no_dist=True)
        set_model_state_dict(other, found["model"])

    return load


def by_safetensors(module: nn.Module, folder: Path) -> Callable[[nn.Module], object]:
    folder.mkdir()
    safetensors.save_model(module, folder / "model.safetensors")
    return lambda other: safetensors.load_model(other, folder / "model.safetensors")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save", [by_checkpoint, by_safetensors])
def test_the_state_is_that_after_the_step(
    save: Callable[[nn.Module, Path], Callable[[nn.Module], object]], tmp_path: Path
) -> None:
    how = SGD(lr=0.1, momentum=0.9)
    loads: list[Callable[[nn.Module], object]] = []

    def body(module: nn.Module, group: Group) -> None:
        loop()(module, group)
        if group.rank == 0:
            loads.append(save(module, tmp_path / "saved"))
        else:
            module.state_dict()

    ends = together(2, build, how, body)
    other = build(7)
    loads[0](other)
    assert_same([dict(other.state_dict())], ends[0], rtol=0)

    def loaded(rank: int) -> nn.Module:
        module = build(rank + 3)
        loads[0](module)
        return module

    assert_same(together(2, loaded, how, lambda module, group: None), ends[0], rtol=0)
