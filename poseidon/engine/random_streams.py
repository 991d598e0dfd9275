"""The random streams of the virtual workers of a process.

A process has one torch generator, one for its GPU, Python's and numpy's. Each virtual worker has
states of its own for them. They are in the generators during its turn, and here at other times. So
have the parts of the script that belong to no virtual worker, such as an evaluation between two
iterations.

Laws:
* The first stream of a virtual worker follows from the script's seed and from its number. Where the
  script was not told how many there are, each worker of a job has one: each generator then follows
  from what it holds before the first turn and from that number. So a script that gives all workers
  the same seeds gets numbers of each worker's own, and the same ones in each run.
* What the script draws between the turns is the same on workers that it has given the same seeds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from poseidon.errors import UsageError


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, and of a GPU's.

    The values are of types that `torch.load(weights_only=True)` reads.
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
    """Restore the generators; a GPU's only where the state has one."""
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
        seed: 0 to 2**64 - 1; numpy's is modulo 2**32.
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
    """
    digest = hashlib.sha256(f"{seed} {virtual_worker}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _seed_of_state(state: bytes, virtual_worker: int) -> int:
    digest = hashlib.sha256(state).digest()
    return seed_of(virtual_worker, int.from_bytes(digest[:8], "little"))


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """What the generators of a process hold.

    Attributes:
        numpy: numpy's bit generator itself: its state is slow to read. A normal number that numpy
            keeps for the next call is not part of it, and is lost.
        cuda: the state of a GPU's generator; None: there is none.
    """

    python: tuple[Any, ...]
    numpy: np.random.BitGenerator
    torch: Tensor
    cuda: Tensor | None


class Generators:
    """The generators of this process: Python's, numpy's, torch's, and a GPU's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_gpu = device.type == "cuda"

    def take(self) -> GeneratorStates:
        """Return what they hold."""
        return GeneratorStates(
            random.getstate(),
            np.random.get_bit_generator(),  # type: ignore[attr-defined]
            torch.get_rng_state(),
            torch.cuda.get_rng_state(self._device) if self._has_gpu else None,
        )

    def put(self, taken: GeneratorStates) -> None:
        """Let them continue from what one of them, or another process's, has held."""
        random.setstate(taken.python)
        np.random.set_bit_generator(taken.numpy)  # type: ignore[attr-defined]
        torch.set_rng_state(taken.torch)
        if taken.cuda is not None and self._has_gpu:
            torch.cuda.set_rng_state(taken.cuda, self._device)

    def seeded(self, seed: int) -> GeneratorStates:
        """Return what they would hold if each was seeded.

        Args:
            seed: 0 to 2**64 - 1; numpy's is modulo 2**32.
        """
        numpy = np.random.MT19937()
        numpy._legacy_seeding(seed % 2**32)
        gpu = torch.Generator(self._device).manual_seed(seed) if self._has_gpu else None
        return GeneratorStates(
            random.Random(seed).getstate(),
            numpy,
            torch.Generator().manual_seed(seed).get_state(),
            None if gpu is None else gpu.get_state(),
        )

    def apart(self, taken: GeneratorStates, virtual_worker: int) -> GeneratorStates:
        """Return what they would hold if a virtual worker went on from there with numbers of its
        own: each generator is seeded by its state and the number.
        """
        seeded = self.seeded
        numpy: Any = taken.numpy.state["state"]
        return GeneratorStates(
            seeded(_seed_of_state(repr(taken.python).encode(), virtual_worker)).python,
            seeded(
                _seed_of_state(numpy["key"].tobytes() + str(numpy["pos"]).encode(), virtual_worker)
            ).numpy,
            seeded(_seed_of_state(taken.torch.numpy().tobytes(), virtual_worker)).torch,
            None
            if taken.cuda is None
            else seeded(_seed_of_state(taken.cuda.numpy().tobytes(), virtual_worker)).cuda,
        )

    def saved(self, taken: GeneratorStates) -> dict[str, Any]:
        """Return it in the form of `random_state`."""
        state: Any = taken.numpy.state
        keys, place = state["state"]["key"], state["state"]["pos"]
        return {
            "python": taken.python,
            "numpy": ("MT19937", torch.from_numpy(keys.astype(np.int64)), int(place), 0, 0.0),
            "torch": taken.torch,
            "cuda": taken.cuda,
        }

    def loaded(self, state: Mapping[str, Any]) -> GeneratorStates:
        """Return what `random_state` or `saved` has returned."""
        version, numbers, gauss_next = state["python"]
        _, keys, place, *_ = state["numpy"]
        numpy = np.random.MT19937()
        numpy.state = {
            "bit_generator": "MT19937",
            "state": {"key": keys.numpy().astype(np.uint32), "pos": place},
        }
        cuda = state["cuda"]
        return GeneratorStates(
            (version, tuple(numbers), gauss_next),
            numpy,
            state["torch"].cpu(),
            None if cuda is None else cuda.cpu(),
        )


class RandomStreams:
    """The random streams of the virtual workers of this process, shared by all its groups.

    A turn begins with a batch of a group's loader or sampler, or with a forward pass. It ends with
    the group's step; where the process has several groups, with the next batch.

    Args:
        seed: of the script on worker 0; None: each generator's first state decides.

    Attributes:
        divided: whether virtual workers have streams; otherwise the generators are the script's.
        current: the virtual worker whose stream is in the generators; None: no one's.
        delivered: the virtual worker whose batch a loader of a group has delivered last; None: it
            has ended, or there is none.
        groups: that take turns with them.
    """

    def __init__(
        self, own: range, seed: int | None, device: torch.device, *, divided: bool = True
    ) -> None:
        self.own = own
        self.divided = divided
        self.current: int | None = None
        self.delivered: int | None = None
        self.groups: WeakSet[object] = WeakSet()
        self._device = device
        self._generators = generators = Generators(device)
        self._seed_at_first: int | None = None
        self._waiting: dict[int | None, GeneratorStates] = {}
        if seed is not None:
            self._seed_at_first = script_seed()
            for virtual_worker in own:
                first = generators.seeded(seed_of(virtual_worker, seed))
                self._waiting[virtual_worker] = first

    def enter(self, virtual_worker: int | None) -> None:
        """Put the stream of a virtual worker into the generators; None: no virtual worker's.

        Raises:
            UsageError: the script has set a seed since the streams were made.
        """
        if virtual_worker == self.current or not self.divided:
            return
        if self._seed_at_first not in (None, script_seed()):
            raise UsageError(
                "torch's seed was set after distribute(), but the random streams of virtual "
                "workers follow from the earlier seed; call torch.manual_seed() before the first "
                "distribute()"
            )
        self._seed_at_first = None
        with torch._C._DisableFuncTorch():  # a state outlives the transform that wraps it
            entered = self._held(virtual_worker)
            self._waiting[self.current] = self._generators.take()
            self._waiting.pop(virtual_worker, None)
            self.current = virtual_worker
            self._generators.put(entered)

    def begin(self, virtual_worker: int) -> None:
        """Begin a turn, unless a loader has begun one.

        Raises:
            UsageError: the loader's batch is another virtual worker's.
        """
        if self.delivered not in (None, virtual_worker):
            raise UsageError(
                f"the module runs on the batch of virtual worker {self.delivered}, but the next "
                f"step() of its group is virtual worker {virtual_worker}'s; run all forward passes "
                "of a batch before the first step(), call step() of each group once for each "
                "virtual worker's batches, and use torch.no_grad() for other forward passes"
            )
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

    def of(self, virtual_worker: int | None) -> Mapping[str, Any] | None:
        """Return the state of a stream, as `random_state` does; None outside of the turns where
        virtual workers have none.
        """
        if not self.divided:
            return None if virtual_worker is None else random_state(self._device)
        return self._generators.saved(self._held(virtual_worker))

    def _held(self, virtual_worker: int | None) -> GeneratorStates:
        if virtual_worker == self.current:
            return self._generators.take()
        if virtual_worker is None or virtual_worker in self._waiting:
            return self._waiting[virtual_worker]
        return self._generators.apart(self._held(None), virtual_worker)

    def load(self, virtual_worker: int | None, state: Mapping[str, Any] | None) -> None:
        """Load the state of a stream; None: it stays."""
        if state is None:
            return
        if not self.divided:
            set_random_state(state, self._device)
            return
        self._seed_at_first = None
        taken = self._generators.loaded(state)
        if virtual_worker == self.current:
            self._generators.put(taken)
        else:
            self._waiting[virtual_worker] = taken
