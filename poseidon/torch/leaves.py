"""The leaves of a group's state (`poseidon/engine/state_tree.py`) that belong to its loop, its module
and its exchange. Updates, tables, samplers and kept objects (`kept.py`) declare their own.

    model      the module's own `state_dict`: it can be loaded without a group
    buffers    of each virtual worker: those that differ from the first one's
    masters    float32 values of tensors of 16 bits, on the workers or on the shards alone
    held_back  what lossy codecs have held back, of the virtual workers of a process at the first
    random     of each virtual worker, and with virtual workers outside of their turns
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from poseidon.engine.leaf import Found, Leaf, LeafStage, Scope, first, on_host
from poseidon.errors import SnapshotError
from poseidon.exchange.auto.recorded import RecordedPlan
from poseidon.exchange.base import is_sharded, local_of
from poseidon.torch.checkpoint_file import FORMAT
from poseidon.torch.divided_states import leaf_of_named, part_of, shared_leaf
from poseidon.torch.group_loop import GroupLoop
from poseidon.torch.kept import in_a_line
from poseidon.torch.own_states import OwnBuffers
from ps_server import RuleKind
from ps_server.numerics import Computation

_DIGEST_BYTES = 32


def progress_leaves(loop: GroupLoop) -> list[Leaf]:
    """Return the loop's progress, and what a start needs to know before it loads a state."""
    context, session, built = loop.context, loop.session, loop.exchanged.observed.built
    label = loop.update.label
    plan = RecordedPlan.of_choices(built.plan).to_json() if built.recorded else ""
    told = context.member.virtual_workers is not None

    def here() -> str:
        return str(Computation.here(context.device))

    def check_label(found: Found) -> None:
        if found.shared != label:
            raise SnapshotError(
                f"{found.source.name} was trained with {found.shared}, and this script gives "
                f"distribute() {label}"
            )

    def compare_computation(found: Found) -> None:
        """Say that this run cannot have the bits of one that was never interrupted."""
        now, source = here(), found.source
        if source.path is not None and found.shared not in (None, now):
            context.job.say(
                f"{source.name} was computed with {found.shared}, and this run computes with "
                f"{now}: it continues correctly, but not with the bits of an uninterrupted run"
            )

    def shared(name: str, **of_leaf: Any) -> Leaf:
        return Leaf(name=name, scope=Scope.SHARED, **of_leaf)

    return [
        Leaf.shared("poseidon", lambda: FORMAT),
        Leaf.shared("steps", lambda: session.steps, lambda n: session.continue_from(steps=n)),
        Leaf.shared(
            "iterations",
            lambda: session.iterations,
            lambda n: session.continue_from(iterations=n),
            stage=LeafStage.EXCHANGE,
        ),
        Leaf.shared("told", lambda: told),
        Leaf.shared("exchange_plan", lambda: plan),
        shared("computation", read=here, write=compare_computation),
        shared("how", read=lambda: label, check=check_label),
    ]


class ModuleLeaves:
    """The tensors of a module."""

    def __init__(self, loop: GroupLoop) -> None:
        self._loop = loop
        self._module = loop.exchanged.module
        self._rest = {name: t for name, t in loop.update.plan.rest.items() if not is_sharded(t)}
        self._own = OwnBuffers(loop.exchanged.module, loop.update.plan.rest, len(loop.tree.own))

    def leaves(self) -> list[Leaf]:
        is_divided = bool(self._loop.update.plan.shards)
        model = shared_leaf(
            "model",
            self._module.state_dict,
            is_divided=is_divided,
            stage=LeafStage.MODULE,
            write=self._write_parts if is_divided else self._write,
        )
        buffers = Leaf(
            name="buffers",
            scope=Scope.VIRTUAL,
            stage=LeafStage.OWN,
            read=self._read_buffers,
            enter=self._own.enter,
            write=self._write_buffers,
            resize=first,
        )
        return [model, buffers]

    def _write(self, found: Found) -> None:
        try:
            self._module.load_state_dict(found.shared)
        except RuntimeError as error:
            raise SnapshotError(
                f"the checkpoint is of a different module: {in_a_line(error)}"
            ) from error

    def _write_parts(self, found: Found) -> None:
        """Write this worker's parts of the tensors of a module that is divided."""
        own = self._module.state_dict()
        shapes = [
            {n: tuple((own[n] if isinstance(t, Mapping) else t).shape) for n, t in state.items()}
            for state in (own, found.shared)
        ]
        if shapes[0] != shapes[1]:
            names = [n for n, shape in shapes[0].items() if shapes[1].get(n) != shape]
            names += [n for n in shapes[1] if n not in shapes[0]]
            raise SnapshotError(
                f"the checkpoint is of a different module: the shape of '{names[0]}' is "
                f"{shapes[1].get(names[0])} in it and {shapes[0].get(names[0])} here"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                local_of(tensor).copy_(part_of(found.shared[name], tensor))

    def _read_buffers(self) -> list[dict[str, Tensor]]:
        """Return the tensors that not all virtual workers have equal, and those that are not in a
        state of the module, of the first virtual worker of each plane.
        """
        mine = b"".join(
            hashlib.sha256(_bytes(tensor)).digest()
            for _ in self._loop.tree.each()
            for tensor in self._rest.values()
        )
        saved, shards = self._module.state_dict(), self._loop.update.plan.shards
        found = b"".join(self._loop.collections.gather(mine))
        differing = {
            name
            for index, name in enumerate(self._rest)
            if len({*_of_tensor(found, index, len(self._rest))}) > 1
        }
        firsts = range(len(shards) or 1)
        return [
            {
                name: on_host(tensor)
                for name, tensor in self._rest.items()
                if name in differing or (number in firsts and name not in saved)
            }
            for number in self._loop.tree.each()
        ]

    def _write_buffers(self, found: Found) -> None:
        self._load(found.each[0])
        self._own.restart()
        for virtual_worker in self._loop.tree.each():
            self._load(found.each[virtual_worker])

    def _load(self, buffers: Mapping[str, Tensor]) -> None:
        for name, value in buffers.items():
            if name not in self._rest or self._rest[name].shape != value.shape:
                raise SnapshotError(
                    f"the checkpoint is of a different module: it has a buffer '{name}'"
                )
            with torch.no_grad():
                self._rest[name].copy_(value)


class CodecLeaves:
    """What the exchange has beside the tensors: masters on the shards, and what codecs hold back."""

    def __init__(self, loop: GroupLoop) -> None:
        self._loop = loop
        self._exchange = loop.exchanged.leaves(loop.tree.own, loop.update.label)
        self._masters_read: dict[str, Tensor] = {}
        self._for_shards: dict[str, Any] = {}

    def leaves(self) -> list[Leaf]:
        of_each = self._exchange.held_back()
        held_back = replace(
            of_each,
            read=lambda: self._without_masters(of_each.read()),
            write=lambda found: self._exchange.hold_back(found, self._for_shards),
        )
        of_worker = self._loop.exchanged.masters
        masters = Leaf.shared("masters", of_worker.state, of_worker.load, stage=LeafStage.OWN)
        on_shards = Leaf(
            name="masters",
            scope=Scope.ROOT,
            stage=LeafStage.OWN,
            read=lambda: self._masters_read,
            write=self._write_shard_masters,
        )
        return [held_back, self._of_whole(masters), on_shards]

    def _of_whole(self, masters: Leaf) -> Leaf:
        """Return a leaf of whole masters, where this worker has parts."""
        named = dict(self._loop.exchanged.module.named_parameters())
        trained = self._loop.update.plan.shards[0] if self._loop.update.plan.shards else ()
        like = {
            t.name: named[t.name]
            for t in trained
            if named[t.name].dtype is not torch.float32 and t.rule.kind is not RuleKind.MEAN
        }
        if not like:
            return masters
        member = self._loop.context.member
        return leaf_of_named(masters, like, lambda _, none, __: none, member)

    def _without_masters(self, held_back: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        self._masters_read = self._loop.exchanged.masters.from_shards(held_back[0])
        return held_back

    def _write_shard_masters(self, found: Found) -> None:
        self._for_shards = dict(self._loop.exchanged.masters.for_shards(found.shared))


class RandomStates:
    """The random states of a group's virtual workers, as leaves of its state."""

    def __init__(self, loop: GroupLoop) -> None:
        self._loop = loop
        self._loaded: dict[int, Mapping[str, Any]] = {}

    def leaves(self) -> list[Leaf]:
        """Return the states of the virtual workers, and the state outside of their turns."""
        loop = self._loop
        of_each = Leaf(
            name="random",
            scope=Scope.VIRTUAL,
            stage=LeafStage.RANDOM,
            read=lambda: [loop.streams.of(virtual_worker) for virtual_worker in loop.tree.own],
            write=self._write,
        )
        outside = Leaf.shared(
            "random",
            lambda: loop.streams.of(None),
            lambda states: loop.streams.load(None, states),
            stage=LeafStage.RANDOM,
        )
        return [of_each, outside]

    def _write(self, found: Found) -> None:
        self._loaded = dict(zip(self._loop.tree.own, found.mine, strict=False))
        for virtual_worker in self._loaded:
            self.put_again(virtual_worker)

    def put_again(self, virtual_worker: int) -> None:
        """Restore a virtual worker's states once more: a DataLoader has drawn a number to resume
        within an epoch.
        """
        self._loop.streams.load(virtual_worker, self._loaded.get(virtual_worker))


def _of_tensor(digests: bytes, index: int, count: int) -> Iterator[bytes]:
    """Yield the digest of one tensor in each list of so many digests."""
    step = count * _DIGEST_BYTES
    for start in range(index * _DIGEST_BYTES, len(digests), step):
        yield digests[start : start + _DIGEST_BYTES]


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8)
    return flat.clone().numpy().tobytes()  # memory that numpy has seen cannot be resized
