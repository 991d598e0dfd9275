"""The state of a process's random generators, in values that `torch.load(weights_only=True)` reads."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Of Python's, numpy's and torch's own generators, and of that of a GPU.

    Args:
        device: where this worker computes.
    """
    name, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (
            name,
            torch.from_numpy(np.asarray(keys, np.int64)),
            int(place),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put generators back; a GPU's only where the state has one.

    Args:
        state: what `random_state` gave.
        device: where this worker computes.
    """
    version, numbers, gauss_next = state["python"]
    random.setstate((version, tuple(numbers), gauss_next))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
