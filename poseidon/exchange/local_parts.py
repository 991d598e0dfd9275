"""This worker's parts of tensors that are divided among workers: torch's DTensor."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from torch import Tensor

DTENSOR = "torch.distributed.tensor"
"""It imports the compiler, so it is left to scripts that use it."""


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a DTensor."""
    module = sys.modules.get(DTENSOR)
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return this worker's part of a tensor: its memory, also while its value is on its way; all of
    a tensor that is not sharded.
    """
    if not is_sharded(tensor):
        return tensor
    part: Tensor = sys.modules[DTENSOR].DTensor._local_tensor.__get__(tensor)
    return part


def like_shard(local: Tensor, sharded: Tensor) -> Tensor:
    """Return a tensor whose part on this worker is `local`, divided as another one is."""
    if not is_sharded(sharded):
        return local
    of: Any = sharded
    found: Tensor = sys.modules[DTENSOR].DTensor.from_local(
        local,
        of.device_mesh,
        of.placements,
        run_check=False,
        shape=of.shape,
        stride=of.stride(),
    )
    return found


def forget_meshes() -> None:
    """Drop what DTensor has computed for meshes whose process groups are gone. A mesh of a later
    start of this process may equal one of them, though its groups have other names; tensors would
    get the old one.
    """
    if DTENSOR in sys.modules:
        import_module(f"{DTENSOR}.debug")._clear_sharding_prop_cache()
