"""Random generators of threads that stand for processes: a process's own are shared by threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from poseidon.engine.module import random_streams, step_loop

_OF_THREAD = threading.local()


def generator() -> torch.Generator:
    """Return the generator of this thread."""
    if not hasattr(_OF_THREAD, "generator"):
        _OF_THREAD.generator = torch.Generator().manual_seed(1)
    found: torch.Generator = _OF_THREAD.generator
    return found


def _random_state(_: torch.device) -> dict[str, Any]:
    return {"torch": generator().get_state()}


def _set_random_state(state: Mapping[str, Any], _: torch.device) -> None:
    generator().set_state(state["torch"])


def _seed_generators(seed: int, _: torch.device) -> None:
    generator().manual_seed(seed)


def _script_seed() -> int:
    return generator().initial_seed()


@contextmanager
def streams_of_threads() -> Iterator[None]:
    """Let the random streams of groups be in the generators of their threads inside the block."""
    with (
        mock.patch.object(random_streams, "random_state", _random_state),
        mock.patch.object(random_streams, "set_random_state", _set_random_state),
        mock.patch.object(random_streams, "seed_generators", _seed_generators),
        mock.patch.object(random_streams, "script_seed", _script_seed),
        mock.patch.object(step_loop, "script_seed", _script_seed),
    ):
        yield
