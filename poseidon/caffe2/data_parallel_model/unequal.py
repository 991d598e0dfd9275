"""Shards of unequal speed: each gets its part of the batch, and all wait for one another less.

speeds = data_parallel_model.ExchangeValue(rendezvous, "images/s", measured)
sizes = data_parallel_model.BatchSizesBySpeed(192, speeds, multiple=len(gpus))
data_parallel_model.Parallelize_GPU(model, ..., rendezvous=rendezvous, shard_batch_sizes=sizes)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from poseidon.caffe2.data_parallel_model.collectives import Rendezvous, between_hosts
from poseidon.caffe2.data_parallel_model.running import BARRIER_TIMEOUT_S
from poseidon.caffe2.shards.common_world import CommonWorld
from poseidon.caffe2.workspace.current import current


def BatchSizesBySpeed(total: int, speeds: Sequence[float], multiple: int = 1) -> list[int]:
    """Return the batch size of each shard, so that all take about the same time.

    Args:
        total: the sum of the batch sizes.
        speeds: images per second of each shard, above 0.
        multiple: what each batch size is a multiple of: the number of devices of a shard.

    Raises:
        ValueError: a speed is not above 0, or the total is not a multiple, or too small for one
            multiple for each shard.
    """
    if not speeds or not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        raise ValueError(f"speeds {list(speeds)}: expected a number above 0 for each shard")
    units, rest = divmod(total, multiple)
    if rest or units < len(speeds):
        raise ValueError(
            f"a batch of {total} for {len(speeds)} shards: expected a multiple of {multiple}, "
            f"{len(speeds) * multiple} or more"
        )
    wanted = [units * speed / sum(speeds) for speed in speeds]
    given = [max(1, math.floor(share)) for share in wanted]
    while sum(given) != units:
        step = 1 if sum(given) < units else -1
        legal = [i for i, size in enumerate(given) if size + step >= 1]
        chosen = max(legal, key=lambda i: (step * (wanted[i] - given[i]), -i))
        given[chosen] += step
    return [size * multiple for size in given]


def ExchangeValue(
    rendezvous: Rendezvous | None, name: str, value: float, timeout_sec: float = BARRIER_TIMEOUT_S
) -> list[float]:
    """Return a number of each shard, by its number; all shards call this.

    Args:
        rendezvous: see `Parallelize`; None for one shard.
        name: what it is; the same on all shards.
        value: this shard's number.
        timeout_sec: longest time to wait for the other shards.

    Raises:
        CollectiveError: a shard does not come in time, or is lost.
    """
    if rendezvous is None or not between_hosts(rendezvous):
        return [value]
    world = CommonWorld(
        current().get(str(rendezvous["kv_handler"])).value,
        f"exchange {name}",
        rank=rendezvous["shard_id"],
        size=rendezvous["num_shards"],
        timeout_s=timeout_sec,
        interface=str(rendezvous.get("interface", "")).partition(",")[0],
    )
    numbers: list[float] = world.all_gather([torch.tensor([value], dtype=torch.float64)]).tolist()
    return numbers
