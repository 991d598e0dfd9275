"""Random generators of threads that stand for processes: a process's own are shared by threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from poseidon.engine import random_streams
from poseidon.torch import own_states

_OF_THREAD = threading.local()


def generator() -> torch.Generator:
    """Return the generator of this thread."""
    if not hasattr(_OF_THREAD, "generator"):
        _OF_THREAD.generator = torch.Generator().manual_seed(1)
    found: torch.Generator = _OF_THREAD.generator
    return found


class OfThread:
    """Stands for `Generators`."""

    def __init__(self, _: torch.device) -> None:
        pass

    def take(self) -> torch.Tensor:
        return generator().get_state()

    def put(self, taken: torch.Tensor) -> None:
        generator().set_state(taken)

    def seeded(self, seed: int) -> torch.Tensor:
        return torch.Generator().manual_seed(seed).get_state()

    def saved(self, taken: torch.Tensor) -> dict[str, Any]:
        return {"torch": taken}

    def loaded(self, state: Mapping[str, Any]) -> torch.Tensor:
        found: torch.Tensor = state["torch"]
        return found


def _script_seed() -> int:
    return generator().initial_seed()


@contextmanager
def streams_of_threads() -> Iterator[None]:
    """Let the random streams of groups be in the generators of their threads inside the block."""
    with (
        mock.patch.object(random_streams, "Generators", OfThread),
        mock.patch.object(random_streams, "script_seed", _script_seed),
        mock.patch.object(own_states, "script_seed", _script_seed),
    ):
        yield
