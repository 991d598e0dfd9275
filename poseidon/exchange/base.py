"""The values that an exchange is built from: its tensors, this worker's parts of those that are
divided among workers (torch's DTensor), and the settings that they have in common.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ps_server import Rule

Array = NDArray[np.float32]

History = Sequence[Array]
"""A tensor's history arrays, each of the tensor's shape: what a solverstate holds for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One tensor that the exchange keeps equal on all replicas.

    Args:
        tensor: the parameter, or statistics; contiguous; updated in place. float32; or of 16 bits
            where the shards alone have its float32 value: then its gradients are of its type.
        rule: how its values follow from its gradients.
        rate_index: of its rate among the rates of an iteration.
        factor_rows: rows of u and v in an iteration, where its gradient is u^T v of one layer's
            output gradient and input; 0 where it is not. It is used for the cost only: the rows
            may differ from iteration to iteration.
        statistics: whether the module's forward pass changes it.
        looked_up: whether few rows of its gradient are not zero: those that a batch looks up.
    """

    name: str
    tensor: Tensor
    rule: Rule = field(default_factory=Rule)
    rate_index: int = 0
    factor_rows: int = 0
    statistics: bool = False
    looked_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """The settings that are common to all tensors of a job.

    Args:
        clip: largest L2 norm of all gradients together; None: no limit.
        gradient_scale: multiplies the gradients after the limit (1 / iter_size).
        start_clock: number of finished iterations that the tensors' values have; > 0 when a run
            is resumed.
        quorum: hosts whose changes end an iteration, which is a round of local steps; 0: all.
        grace_s: seconds that it then waits for others.
    """

    clip: float | None = None
    gradient_scale: float = 1.0
    start_clock: int = 0
    quorum: int = 0
    grace_s: float = 0.0


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
    """Return a DTensor with this local part, and with the mesh and placements of `sharded`."""
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
