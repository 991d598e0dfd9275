"""Shared blobs: a blob takes the name of one that nothing reads any more.

A blob may take the place of another where all operators that touch the other must run before the
one that makes it first. In a dag this is what the net's dependencies say, so that sharing never
makes parallel branches wait for each other.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poseidon.caffe2.memonger.interference import (
    apply_assignments,
    check_operators,
    verify_graph_equality,
    verify_inplace_blobs,
)
from poseidon.caffe2.runtime.chains import dependencies, nested_blobs

log = logging.getLogger("memonger")
log.setLevel(logging.INFO)

_ON_THE_CPU = ("CopyGPUToCPU", "EnsureCPUOutput")
"""Operators with a GPU as their device whose outputs are on the CPU."""


def share_grad_blobs(
    net: Any,
    losses: Iterable[Any],
    param_grads: Iterable[Any],
    namescope: str,
    dont_share_blobs: Iterable[Any] | None = None,
    share_activations: bool = False,
    blob_shapes: Mapping[str, Sequence[int]] | None = None,
) -> Any:
    """Return a NetDef whose gradients share blobs `<namescope>__m<i>_shared`; same results.

    Args:
        net: the net, with its gradient operators.
        losses: where the search begins: the losses, or their gradients.
        param_grads: gradients of parameters, which keep their blobs.
        namescope: only gradients of this scope share.
        dont_share_blobs: blobs that keep their names and their values.
        share_activations: whether outputs of layers share too, save the last two.
        blob_shapes: shapes by name; a blob then prefers one of its size.
    """
    log.warning("NOTE: Executing memonger to optimize gradient memory")
    begin = time.time()
    if namescope and not namescope.endswith("/"):
        namescope += "/"
    of_parameters = _names(param_grads)
    proto = net.Proto()

    def is_gradient(name: str) -> bool:
        ours = name.startswith((namescope, f"_{namescope}")) and name not in of_parameters
        return ours and (name.endswith("_grad") or "_grad_autosplit_" in name)

    gradient_ops = [
        index
        for index, op in enumerate(proto.op)
        if any(is_gradient(name) for name in (*op.input, *op.output))
    ]
    shareable = {name for op in proto.op for name in (*op.input, *op.output) if is_gradient(name)}
    if share_activations:
        shareable.update(_activations(proto)[:-2])
    shared = _Sharing(
        proto, gradient_ops, shareable, _names(dont_share_blobs or ()), blob_shapes or {}
    )
    optimized = shared.net(_names(losses), namescope)
    log.info("Memonger memory optimization took %s secs", time.time() - begin)
    return optimized


def optimize_inference_for_dag(net: Any, input_blobs: Iterable[Any], namescope: str = "") -> Any:
    """Return a NetDef whose blobs share names, `<namescope>__m<i>_shared`; results are the same.

    External inputs and outputs of the net keep their names. Any other blob may lose its name or its
    value: declare as external outputs what is fetched.

    Args:
        net: a net without gradient operators.
        input_blobs: where the search begins.
        namescope: prefix of the names.

    Raises:
        AssertionError: the net has gradient operators, or reads a blob of unknown origin.
    """
    begin = time.time()
    proto = net.Proto()
    external = {*proto.external_input, *proto.external_output}
    made: set[str] = set()
    for op in proto.op:
        for name in op.input:
            assert name in made or name in external, f"{name} not in external input"
        made.update(op.output)
        assert not op.is_gradient_op, "optimize_inference_for_dag takes inference nets only"
    shared = _Sharing(proto, range(len(proto.op)), made - external, set(), {})
    optimized = shared.net(_names(input_blobs), namescope)
    log.info("Memonger memory optimization took %s secs", time.time() - begin)
    return optimized


def optimize_inference_fast(net: Any, static_blobs: Iterable[Any]) -> Any:
    """Return a NetDef whose blobs share names, `__m<i>_shared`, by the order of its operators.

    A net of a different type than simple, or with recurrent operators, comes back as it is.

    Args:
        net: a NetDef.
        static_blobs: blobs that keep their names: inputs, parameters and what is fetched.
    """
    optimized = copy.deepcopy(net)
    if net.type not in ("", "simple"):
        log.info("Cannot optimize memory for nets of type: %s", net.type)
        return optimized
    if any(op.type == "RecurrentNetwork" for op in net.op):
        log.info("Memonger does not support RecurrentNetwork yet")
        return optimized
    names = {name for op in net.op for name in (*op.input, *op.output)}
    if any(name.startswith("__m") and name.endswith("_shared") for name in names):
        log.info("Net was already memongered!")
        return optimized
    static = _names(static_blobs)
    made = {name for op in net.op for name in op.output}
    before = [(1 << index) - 1 for index in range(len(net.op))]
    return _Sharing(net, range(len(net.op)), made - static, set(), {}, before).net(None, "")


def _names(blobs: Iterable[Any]) -> set[str]:
    """Return the names of blobs; a sparse gradient has two."""
    names: set[str] = set()
    for blob in blobs:
        if hasattr(blob, "indices") and hasattr(blob, "values"):
            names.update((str(blob.indices), str(blob.values)))
        else:
            names.add(str(blob))
    return names


def _activations(proto: Any) -> list[str]:
    """Return the outputs of layers with weights, in order: those with an input `<output>_w`."""
    fetched = set(proto.external_output)
    return [
        name
        for op in proto.op
        for name in op.output
        if f"{name}_w" in op.input and name not in fetched
    ]


@dataclass(slots=True)
class _Slot:
    """A blob that others may take the place of.

    Attributes:
        name: of the first blob.
        members: all blobs that have it, the current one last.
        users: the operators that touch the current one, as bits.
        device: where it is.
        size: values of the largest member, None where it is not known.
    """

    name: str
    members: list[str]
    users: int
    device: tuple[int, int]
    size: float | None

    @property
    def last_user(self) -> int:
        """The last operator that touches the current blob."""
        return self.users.bit_length()


class _Sharing:
    """The search for blobs that can share a name."""

    def __init__(
        self,
        proto: Any,
        operators: Iterable[int],
        shareable: Collection[str],
        dont_share: Collection[str],
        shapes: Mapping[str, Sequence[int]],
        before: list[int] | None = None,
    ) -> None:
        """Read the net.

        Args:
            proto: the NetDef.
            operators: the indices of the operators whose outputs may get shared names.
            shareable: the blobs that may share.
            dont_share: blobs that may not.
            shapes: by name.
            before: for each operator the earlier ones, as bits; by default its dependencies.

        Raises:
            RuntimeError: an operator is used in a way that its schema forbids.
        """
        check_operators(proto)
        self.proto = proto
        self.operators = list(operators)
        kept = {*dont_share, *proto.external_input, *proto.external_output}
        self.shareable = set(shareable) - kept - nested_blobs(proto.op)
        self.shapes = shapes
        self.before = _ancestors(proto) if before is None else before
        self.users: dict[str, int] = {}
        self.first_use: dict[str, int] = {}
        self.read: set[str] = set()
        for index, op in enumerate(proto.op):
            for name in (*op.input, *op.output):
                self.users[name] = self.users.get(name, 0) | 1 << index
                self.first_use.setdefault(name, index)
            self.read.update(op.input)
        self.slots: list[_Slot] = []

    def net(self, heads: Collection[str] | None, namescope: str) -> Any:
        """Return the net with shared names.

        Args:
            heads: blobs; only operators behind these count. None for all.
            namescope: prefix of the names.
        """
        operators = self.operators if heads is None else self._behind(heads)
        inside = {name for index in operators for name in self.proto.op[index].output}
        for name in sorted(self.shareable - inside):
            if any(self.users.get(name, 0) >> index & 1 for index in operators):
                self._add_slot(name, self.first_use[name])
        for index in operators:
            for name in self._first_outputs(index):
                if name in self.read and not self._take_slot(name, index):
                    self._add_slot(name, index)
        for index in operators:  # what nobody reads stays for ever: it gets what is left
            for name in self._first_outputs(index):
                if name not in self.read:
                    self._take_slot(name, index, for_ever=True)
        return self._renamed(inside, namescope)

    def _behind(self, heads: Collection[str]) -> list[int]:
        """Return the operators that read a head, or what another of them makes."""
        reached, found = set(heads), []
        for index in self.operators:
            op = self.proto.op[index]
            if reached.intersection(op.input):
                found.append(index)
                reached.update(op.output)
        return found

    def _first_outputs(self, index: int) -> list[str]:
        """Return the outputs of an operator that may share and that nothing has touched before."""
        op = self.proto.op[index]
        return [
            name
            for name in dict.fromkeys(op.output)
            if name in self.shareable and self.first_use[name] == index and name not in op.input
        ]

    def _size(self, name: str) -> float | None:
        return math.prod(self.shapes[name]) if name in self.shapes else None

    def _device(self, index: int) -> tuple[int, int]:
        op = self.proto.op[index]
        return (
            (0, 0)
            if op.type in _ON_THE_CPU
            else (op.device_option.device_type, op.device_option.device_id)
        )

    def _add_slot(self, name: str, index: int) -> None:
        self.slots.append(
            _Slot(name, [name], self.users[name], self._device(index), self._size(name))
        )

    def _take_slot(self, name: str, index: int, for_ever: bool = False) -> bool:
        """Give a blob the place of one dead before an operator; return False if there is none."""
        device = self._device(index)
        free = [
            slot
            for slot in self.slots
            if slot.device == device and not slot.users & ~self.before[index]
        ]
        if not free:
            return False
        slot = min(free, key=_fit(self._size(name)))
        slot.members.append(name)
        slot.users = self.users[name] | (1 << len(self.proto.op) if for_ever else 0)
        slot.size = max(slot.size or 0, self._size(name) or 0) if self.shapes else None
        return True

    def _renamed(self, inside: Collection[str], namescope: str) -> Any:
        taken, mapping, number = set(self.users), dict[str, str](), 0
        shared = [slot for slot in self.slots if len(slot.members) > 1]
        for slot in shared:
            name = slot.name
            while slot.name in inside and name in taken:
                name = f"{namescope}__m{number}_shared"
                number += 1
            mapping.update(dict.fromkeys(slot.members, name))
        log.info("Remapping %d using %d shared blobs.", len(mapping), len(shared))
        saved = sum(self._size(name) or 0 for slot in shared for name in slot.members[1:])
        if saved:
            log.info("Memonger saved approximately : %s MB.", saved * 4 / 1024 / 1024)
        optimized = copy.deepcopy(self.proto)
        apply_assignments(optimized, mapping)
        assert verify_graph_equality(self.proto, optimized), "the memonger's graph differs"
        assert verify_inplace_blobs(self.proto, optimized), "the memonger's in-place blobs differ"
        return optimized


def _fit(size: float | None) -> Callable[[_Slot], tuple[float, float]]:
    """Return the order of preference: the least difference of sizes, then the last used."""

    def key(slot: _Slot) -> tuple[float, float]:
        known = size is not None and slot.size is not None
        return (abs(slot.size - size) if known else 0, -slot.last_user)  # type: ignore[operator]

    return key


def _ancestors(proto: Any) -> list[int]:
    """Return for each operator those that must run before it, as bits."""
    above: list[int] = []
    for needed in dependencies(proto.op):
        mask = 0
        for earlier in needed:
            mask |= above[earlier] | 1 << earlier
        above.append(mask)
    return above
