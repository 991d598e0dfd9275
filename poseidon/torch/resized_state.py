"""The state of a checkpoint for a different number of workers.

    model, optimizer, a shared history      the same for all workers: as they are
    histories of each worker                their mean
    positions of samplers                   the records that all workers have read together
    buffers that differ between workers     worker 0's
    random states                           left as the script has set them
    what lossy codecs have held back        left out

Law: worker g of W reads records g, g + W, ... of an order that all share, and all have read equally
many. So together they have read the first records of the order, and any number of workers can read
the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from poseidon.errors import SnapshotError

HISTORIES = ("history", "outer")


def resized(state: Mapping[str, Any], workers: int, source: str) -> dict[str, Any]:
    """Return a group's state for a different number of workers.

    Raises:
        SnapshotError: the script keeps a state of each worker's own.
    """
    own: Sequence[Mapping[str, Any]] = state["own"]
    kept = own[0].get("kept", {})
    if kept:
        raise SnapshotError(
            f"{source} was saved by {len(own)} worker(s), and this job has {workers}: the states "
            f"of {', '.join(sorted(kept))} belong to each worker (keep_own); expected as many "
            "workers"
        )
    means = {
        key: _mean([one[key] for one in own if key in one]) for key in HISTORIES if key in own[0]
    }
    optimizer = {"optimizer": own[0]["optimizer"]} if "optimizer" in own[0] else {}
    each = {
        "random": None,
        "samplers": [_read_together(sampler, len(own)) for sampler in own[0]["samplers"]],
        "buffers": own[0]["buffers"],
        **means,
        **optimizer,
    }
    return {**state, "workers": workers, "random": None, "own": [each] * workers}


def _read_together(sampler: Mapping[str, Any], workers: int) -> dict[str, Any]:
    read = sampler.get("offset", 0) + sampler["position"] * workers
    return {**sampler, "position": 0, "offset": min(read, sampler["records"])}


def _mean(of_workers: Sequence[Mapping[str, Sequence[Tensor]]]) -> dict[str, list[Tensor]]:
    return {
        name: [
            torch.stack(column).mean(0)
            for column in zip(*(histories[name] for histories in of_workers), strict=True)
        ]
        for name in of_workers[0]
    }
