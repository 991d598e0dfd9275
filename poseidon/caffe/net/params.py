"""The learnable blobs of a net (owner, sharing, learning-rate multipliers), and the states of its
random generators.

Law: order and rules are Caffe's (Net::AppendParam). A blob without a name, or the first of its
name, is owned by its layer and gets the next index. Later blobs of that name share its tensor.
Layers may have the same name. Tables, states and files need distinct ones, so a later layer gets a
number: `ip`, `ip#2`.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from poseidon.caffe.layers.base import BlobSpec, LayerError, Shape, times
from poseidon.caffe.proto.caffe_pb2 import LayerParameter, ParamSpec
from poseidon.errors import SnapshotError, counted


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """A learnable tensor.

    Attributes:
        name: `<owner layer>.<blob index>`, unique in the net.
        layer: the distinct name of the layer that owns it.
        factors: the gradient is u^T v of one layer, so it can be sent as sufficient factors.
        statistics: the layer's forward pass updates it in training; solvers do not.
        looked_up: few rows of the gradient are not zero: those that a batch looks up.
    """

    name: str
    shape: Shape
    lr_mult: float
    decay_mult: float
    parameter: nn.Parameter
    layer: str
    factors: bool
    statistics: bool = False
    looked_up: bool = False


@dataclass(slots=True)
class OwnedBlob:
    """A blob during compilation. Layers that share it may still set its multipliers."""

    key: str
    layer: LayerParameter
    index: int
    spec: BlobSpec
    lr_mult: float | None
    decay_mult: float | None
    factors: bool
    statistics: bool = False
    parameter: nn.Parameter | None = None

    def info(self) -> ParamInfo:
        """Return the learnable tensor, whose parameter is set. Multipliers that are not are 1."""
        assert self.parameter is not None
        return ParamInfo(
            name=f"{self.key}.{self.index}",
            shape=self.spec.shape,
            lr_mult=1.0 if self.lr_mult is None else self.lr_mult,
            decay_mult=1.0 if self.decay_mult is None else self.decay_mult,
            parameter=self.parameter,
            layer=self.key,
            factors=self.factors,
            statistics=self.statistics,
            looked_up=self.spec.looked_up,
        )


class ParamTable:
    """The table of a net's blobs, filled layer by layer."""

    def __init__(self) -> None:
        self._owned: list[OwnedBlob] = []
        self._by_name: dict[str, OwnedBlob] = {}
        self.names = DistinctNames()

    def add_layer(
        self,
        param: LayerParameter,
        specs: tuple[BlobSpec, ...],
        *,
        factors: bool,
        statistics: bool = False,
    ) -> tuple[str | None, list[OwnedBlob]]:
        """Add the blobs of the next layer.

        Args:
            factors: whether the gradient of the first blob can be sent as factors.
            statistics: whether the layer updates its blobs that do not learn.

        Returns:
            the distinct name of the layer, None if it has no blobs, and the entry of each blob: a
            new one, or the one that it shares.

        Raises:
            LayerError: the layer has more param specs than blobs, a multiplier is not finite, or
                sharers disagree.
        """
        if len(param.param) > len(specs):
            raise LayerError(
                f"has {counted(len(param.param), 'param spec')}, expected at most {len(specs)}: "
                f"it has {counted(len(specs), 'blob')}"
            )
        if not specs:
            return None, []
        key = self.names.add(param.name)
        unset = ParamSpec()
        entries = []
        for index, spec in enumerate(specs):
            spec_param = param.param[index] if index < len(param.param) else unset
            entry = self._add(key, param, index, spec, spec_param, factors)
            entry.statistics |= statistics and not spec.learns
            entries.append(entry)
        return key, entries

    def _add(
        self,
        key: str,
        param: LayerParameter,
        index: int,
        spec: BlobSpec,
        spec_param: ParamSpec,
        factors: bool,
    ) -> OwnedBlob:
        if spec_param.name and spec_param.name in self._by_name:
            owner = self._by_name[spec_param.name]
            _check_share(owner, spec.shape, spec_param)
            owner.factors = False
            return owner
        fixed = not spec.learns and spec.fixes_rate
        if not spec.learns and not fixed and spec_param != ParamSpec() and spec_param.lr_mult != 0:
            raise LayerError(
                f"blob {index} holds statistics, which solvers do not update; expected lr_mult: 0"
            )
        entry = OwnedBlob(
            key=key,
            layer=param,
            index=index,
            spec=spec,
            lr_mult=_given(spec_param, "lr_mult") if spec.learns else 0.0,
            decay_mult=0.0 if fixed else _given(spec_param, "decay_mult"),
            factors=factors and index == 0,
        )
        self._owned.append(entry)
        if spec_param.name:
            self._by_name[spec_param.name] = entry
        return entry

    def learns(self) -> dict[str, bool]:
        """Return whether solvers may update each tensor, by name."""
        return {f"{entry.key}.{entry.index}": entry.spec.learns for entry in self._owned}

    def infos(self) -> tuple[ParamInfo, ...]:
        """Return all tensors in Caffe's learnable order. Every entry must have its parameter."""
        return tuple(entry.info() for entry in self._owned)


class DistinctNames:
    """Gives a distinct name to each of several layers, whose own may be equal."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._counts: Counter[str] = Counter()

    def add(self, name: str) -> str:
        """Return the name, with a number from 2 if it is taken."""
        found = name
        while found in self._taken:
            self._counts[name] += 1
            found = f"{name}#{self._counts[name] + 1}"
        self._taken.add(found)
        return found


def _check_share(owner: OwnedBlob, shape: Shape, spec_param: ParamSpec) -> None:
    """Raise LayerError unless a blob of `shape` can share the owner's tensor.

    Merge its multipliers into the owner.
    """
    prefix = f"param '{spec_param.name}', shared with layer '{owner.layer.name}',"
    wanted = owner.spec.shape
    if spec_param.share_mode == ParamSpec.PERMISSIVE:
        if math.prod(shape) != math.prod(wanted):
            raise LayerError(
                f"{prefix} has {math.prod(shape)} values, expected {math.prod(wanted)}"
            )
    elif shape != wanted:
        raise LayerError(f"{prefix} has shape {times(shape)}, expected {times(wanted)}")
    for name in ("lr_mult", "decay_mult"):
        first, second = getattr(owner, name), _given(spec_param, name)
        if first is not None and second is not None and first != second:
            raise LayerError(f"{prefix} has {name} {second:g}, expected {first:g} as in that layer")
        setattr(owner, name, second if first is None else first)


def _given(param: ParamSpec, name: str) -> float | None:
    """Return a multiplier of a `param` block, None if it is not set."""
    if not math.isfinite(getattr(param, name)):
        raise LayerError(f"{name} is {getattr(param, name)}, expected a finite number")
    return float(getattr(param, name)) if param.HasField(name) else None


LENGTH = struct.Struct("<I")


def derive_seed(seed: int, *path: int | str) -> int:
    """Return a seed of 63 bits that is a hash of `seed` and `path`, the same on all hosts and
    Python versions.

    >>> derive_seed(1, "blob", 0) == derive_seed(1, "blob", 0), derive_seed(1, "blob", 0) == derive_seed(1, "blob", 1)
    (True, False)
    """
    text = "/".join([str(seed), *map(str, path)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def pack_states(generators: Sequence[torch.Generator]) -> bytes:
    """Serialize the states in order, each as its length and its bytes."""
    states = [generator.get_state().numpy().tobytes() for generator in generators]
    return b"".join(LENGTH.pack(len(state)) + state for state in states)


def unpack_states(generators: Sequence[torch.Generator], packed: bytes) -> None:
    """Restore states that `pack_states` returned.

    Raises:
        SnapshotError: the states belong to different generators or a different kind of device.
    """
    parts, rest = [], packed
    while len(rest) >= LENGTH.size:
        (length,) = LENGTH.unpack_from(rest)
        parts.append(rest[LENGTH.size : LENGTH.size + length])
        rest = rest[LENGTH.size + length :]
    lengths = [generator.get_state().numel() for generator in generators]
    if rest or [len(part) for part in parts] != lengths:
        raise SnapshotError(
            f"the random state is of {len(parts)} layers ({len(packed)} bytes), and this net has "
            f"{len(generators)} random layers"
        )
    for generator, part in zip(generators, parts, strict=True):
        generator.set_state(torch.frombuffer(bytearray(part), dtype=torch.uint8))
