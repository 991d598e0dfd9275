"""The threads of a process that computes for virtual workers outside of a job."""

from __future__ import annotations

from collections.abc import Callable

import torch

from poseidon.settings import are_threads_set


def compute_with_one_thread(say: Callable[[str], object]) -> None:
    """Compute with one thread, as the workers of a job with virtual workers do, unless the user
    has set a number: bits may depend on it.

    Args:
        say: tells the user.
    """
    if torch.get_num_threads() > 1 and not are_threads_set():
        torch.set_num_threads(1)
        say(
            "virtual workers: computing with 1 thread, as in a job; OMP_NUM_THREADS=N sets "
            "another number"
        )
