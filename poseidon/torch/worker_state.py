"""The state of a worker in a checkpoint, besides a rule's histories or an optimizer's state.

    model     the module's own `state_dict`, the same on all workers: it can be loaded without a group
    kept      the states of the objects that the script has given to `keep`, from rank 0
    random    with virtual workers: the random states outside of their turns, from rank 0
    own       for each virtual worker: random states, positions of samplers, buffers that differ
              from the first one's, and the states of the objects that the script has given to
              `keep_own`

Law: all workers load the same bytes, so all of them refuse a state that does not fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from poseidon.engine.random_streams import random_state, set_random_state
from poseidon.errors import SnapshotError, UsageError
from poseidon.torch.checkpoint_file import on_host
from poseidon.torch.group_turns import GroupTurns
from poseidon.torch.sampler import SharedSampler

_DIGEST_BYTES = 32


class Kept(Protocol):
    """An object with a state: a scheduler, a GradScaler, a running average."""

    def state_dict(self) -> Any:
        """Return the state, of types that `torch.load(weights_only=True)` reads."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""


class WorkerState:
    """The state of one worker.

    Args:
        rest: its tensors that are not exchanged in every step, by name.
    """

    def __init__(
        self,
        module: nn.Module,
        rest: Mapping[str, Tensor],
        device: torch.device,
        turns: GroupTurns,
    ) -> None:
        self._turns = turns
        self._module = module
        self._rest = rest
        self._device = device
        self._kept: dict[str, Kept] = {}
        self._kept_own: dict[str, Kept] = {}
        self._samplers: list[SharedSampler] = []
        # states of samplers that the script has not created yet
        self._unclaimed: list[Mapping[str, Any]] = []
        self._random: dict[int, Mapping[str, Any] | None] = {}

    def keep(self, objects: Mapping[str, Kept], *, own: bool = False) -> None:
        """Save and load these objects too.

        Args:
            own: each worker's states; otherwise rank 0's count for all.

        Raises:
            UsageError: one has no state, or its name is taken.
        """
        for name, kept in objects.items():
            if name in self._kept or name in self._kept_own:
                raise UsageError(f"keep() already has something of the name '{name}'")
            if not (hasattr(kept, "state_dict") and hasattr(kept, "load_state_dict")):
                raise UsageError(
                    f"keep() was given a {type(kept).__name__} as '{name}'; expected something "
                    "with state_dict() and load_state_dict()"
                )
        (self._kept_own if own else self._kept).update(objects)

    def add(self, sampler: SharedSampler) -> None:
        """Add a sampler of the script. Samplers are identified by the order of their creation."""
        self._samplers.append(sampler)
        if self._unclaimed:
            sampler.load_state_dict(self._unclaimed.pop(0))

    def return_random(self, virtual_worker: int) -> None:
        """Restore the random states once more: a DataLoader has drawn a number to resume within
        an epoch.
        """
        state, streams = self._random.get(virtual_worker), self._turns.streams
        if state is not None and streams is not None:
            streams.load(virtual_worker, state)
        elif state is not None:
            set_random_state(state, self._device)

    def shared(self) -> dict[str, Any]:
        """Return the state that all workers share."""
        streams = self._turns.streams
        return {
            **({} if streams is None else {"random": streams.of(None)}),
            "model": on_host(self._module.state_dict()),
            "kept": {name: on_host(kept.state_dict()) for name, kept in self._kept.items()},
        }

    def digests(self) -> bytes:
        """Return digests of `rest`, to find the tensors that differ between workers."""
        return b"".join(hashlib.sha256(_bytes(tensor)).digest() for tensor in self._rest.values())

    def own(self, first: bytes) -> list[dict[str, Any]]:
        """Return the state of each virtual worker of this process.

        Args:
            first: the digests of the first one of all.
        """
        return [self._own_of(virtual_worker, first) for virtual_worker in self._turns.each()]

    def _own_of(self, virtual_worker: int, first: bytes) -> dict[str, Any]:
        mine, streams = self.digests(), self._turns.streams
        saved = self._module.state_dict() if virtual_worker == 0 else {}
        differs = {
            name: on_host(tensor)
            for index, (name, tensor) in enumerate(self._rest.items())
            if (virtual_worker == 0 and name not in saved) or _at(mine, index) != _at(first, index)
        }
        return {
            "random": random_state(self._device) if streams is None else streams.of(virtual_worker),
            "samplers": [sampler.state_dict() for sampler in self._samplers],
            "buffers": differs,
            "kept": {name: on_host(kept.state_dict()) for name, kept in self._kept_own.items()},
        }

    def load_tensors(self, state: Mapping[str, Any]) -> None:
        """Load the module's tensors.

        Raises:
            SnapshotError: they are of a different module.
        """
        try:
            self._module.load_state_dict(state["model"])
        except RuntimeError as error:
            raise SnapshotError(
                f"the checkpoint is of a different module: {_in_a_line(error)}"
            ) from error
        self._load_buffers(state["own"][0]["buffers"])
        self._turns.buffers.restart()
        for virtual_worker in self._turns.each():
            self._load_buffers(state["own"][virtual_worker]["buffers"])

    def _load_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        for name, value in buffers.items():
            if name not in self._rest or self._rest[name].shape != value.shape:
                raise SnapshotError(
                    f"the checkpoint is of a different module: it has a buffer '{name}'"
                )
            with torch.no_grad():
                self._rest[name].copy_(value)

    def load_rest(self, state: Mapping[str, Any]) -> None:
        """Load everything else: positions of samplers, kept objects, and at last the random states.

        Raises:
            SnapshotError: the script keeps other things.
            UsageError: a sampler has a different order.
        """
        owners = {
            virtual_worker: state["own"][virtual_worker] for virtual_worker in self._turns.own
        }
        own = owners[self._turns.own[0]]
        _load(self._kept, state["kept"], "keep")
        _load(self._kept_own, own.get("kept", {}), "keep_own")
        self._unclaimed = list(own["samplers"])
        for sampler in self._samplers:
            if self._unclaimed:
                sampler.load_state_dict(self._unclaimed.pop(0))
        self._random = {virtual_worker: one["random"] for virtual_worker, one in owners.items()}
        for virtual_worker in owners:
            self.return_random(virtual_worker)
        if self._turns.streams is not None and state.get("random") is not None:
            self._turns.streams.load(None, state["random"])


def _load(objects: Mapping[str, Kept], states: Mapping[str, Any], call: str) -> None:
    """Load the states of kept objects."""
    if states.keys() != objects.keys():
        names = [", ".join(sorted(part)) or "nothing" for part in (states, objects)]
        raise SnapshotError(
            f"the checkpoint keeps {names[0]}; this script has handed {names[1]} to {call}()"
        )
    for name, kept in objects.items():
        try:
            kept.load_state_dict(states[name])
        except (ValueError, RuntimeError, KeyError, TypeError) as error:
            raise SnapshotError(
                f"'{name}' does not take what the checkpoint has: {_in_a_line(error)}"
            ) from error


def _at(digests: bytes, index: int) -> bytes:
    return digests[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES]


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8)
    return flat.clone().numpy().tobytes()  # memory that numpy has seen cannot be resized


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
