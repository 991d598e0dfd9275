"""The random streams of the virtual workers of a process.

A process has one torch generator, one for its GPU, Python's and numpy's. Each virtual worker has
states of its own for them. They are in the generators during its turn, and here at other times. So
have the parts of the script that belong to no virtual worker, such as an evaluation between two
iterations.

Law: the first stream of a virtual worker follows from the script's seed and from its number.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from poseidon.errors import UsageError


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, and of a GPU's.

    The values are of types that `torch.load(weights_only=True)` reads.

    Args:
        device: the device of this worker.
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
    """Restore the generators; a GPU's only where the state has one.

    Args:
        state: from `random_state`.
        device: the device of this worker.
    """
    version, numbers, gauss_next = state["python"]
    random.setstate((version, tuple(numbers), gauss_next))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed all generators of `random_state`.

    Args:
        seed: 0 to 2**64 - 1.
        device: the device of this worker.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def script_seed() -> int:
    """Return the seed that the script has given torch last; torch has one of its own."""
    return torch.initial_seed()


def seed_of(virtual_worker: int, seed: int) -> int:
    """Return the seed of a virtual worker's first stream: the first 8 bytes of the SHA-256 of
    `<seed> <virtual worker>`, little-endian.

    Args:
        virtual_worker: its number.
        seed: the script's.
    """
    digest = hashlib.sha256(f"{seed} {virtual_worker}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


class RandomStreams:
    """The random streams of the virtual workers of this process, shared by all its groups.

    A turn begins with a batch of a group's loader or sampler, or with a forward pass. It ends with
    the group's step; where the process has several groups, with the next batch.

    Args:
        own: the virtual workers of this process.
        seed: of the script on worker 0.
        device: of this process.

    Attributes:
        current: the virtual worker whose stream is in the generators; None: no one's.
        delivered: the virtual worker whose batch a loader of a group has delivered last; None: it
            has ended, or there is none.
        groups: the turns of each group.
    """

    def __init__(self, own: range, seed: int, device: torch.device) -> None:
        self.own = own
        self.current: int | None = None
        self.delivered: int | None = None
        self.groups: WeakSet[object] = WeakSet()
        self._device = device
        self._states: dict[int | None, Mapping[str, Any]] = {None: random_state(device)}
        self._seed_at_first: int | None = script_seed()
        for virtual_worker in own:
            seed_generators(seed_of(virtual_worker, seed), device)
            self._states[virtual_worker] = random_state(device)
        set_random_state(self._states[None], device)

    def enter(self, virtual_worker: int | None) -> None:
        """Put the stream of a virtual worker into the generators; None: that of no one.

        Raises:
            UsageError: the script has set a seed since the streams were made.
        """
        if virtual_worker == self.current:
            return
        if self._seed_at_first not in (None, script_seed()):
            raise UsageError(
                "the script has set torch's seed after distribute() with virtual workers, whose "
                "random streams follow from the seed that was set before; expected "
                "torch.manual_seed() before the first distribute()"
            )
        self._seed_at_first = None
        self._states[self.current] = random_state(self._device)
        self.current = virtual_worker
        set_random_state(self._states[virtual_worker], self._device)

    def begin(self, virtual_worker: int) -> None:
        """Begin a turn, unless a loader has begun one."""
        if self.current is None or self.delivered is None:
            self.enter(virtual_worker)

    def begin_reading(self, virtual_worker: int) -> None:
        """Begin a turn, if none is under way: a sampler draws a record of it."""
        if self.current is None:
            self.enter(virtual_worker)

    def end_step(self, *, ends_iteration: bool) -> None:
        """End a turn with the step of the only group."""
        if len(self.groups) == 1:
            self.enter(None)
            if ends_iteration:
                self.delivered = None

    def of(self, virtual_worker: int | None) -> Mapping[str, Any]:
        """Return the state of a stream."""
        if virtual_worker == self.current:
            return random_state(self._device)
        return self._states[virtual_worker]

    def load(self, virtual_worker: int | None, state: Mapping[str, Any]) -> None:
        """Set the state of a stream."""
        self._seed_at_first = None
        self._states[virtual_worker] = state
        if virtual_worker == self.current:
            set_random_state(state, self._device)
