"""The state of random generators survives a checkpoint file."""

from __future__ import annotations

import random

import numpy as np
import torch

from poseidon.engine.module.checkpoint_file import packed, unpacked
from poseidon.engine.module.worker_state import random_state, set_random_state

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float, float]:
    """Of each generator; the second normal number of a pair is kept in its state."""
    return (
        random.gauss(0, 1),
        float(np.random.normal()),
        float(np.random.random()),
        torch.rand(()).item(),
    )


def test_all_generators_go_on() -> None:
    before = random_state(CPU)
    try:
        draw()
        state = unpacked(packed(random_state(CPU)), "a test")
        expected = [draw() for _ in range(3)]
        set_random_state(state, CPU)
        assert [draw() for _ in range(3)] == expected
    finally:
        set_random_state(before, CPU)
