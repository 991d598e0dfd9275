"""The learnable blobs of a net: who owns each, who shares it, how fast it learns.

Law: order and rules are Caffe's (Net::AppendParam). A blob without a name, or the first of its name, is owned by its
layer and takes the next place; later blobs of that name are the same tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from poseidon.layers.base import BlobSpec, LayerError, Shape, counted, times
from poseidon.proto.caffe_pb2 import LayerParameter, ParamSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """One learnable tensor.

    Attributes:
        name: `<owner layer>.<blob index>`, unique in the net.
        shape: its shape.
        lr_mult: factor of the learning rate.
        decay_mult: factor of the weight decay.
        parameter: the tensor.
        layer: the layer that owns it.
        layer_type: that layer's type.
        factors: its gradient is u^T v of one layer, so it may travel as sufficient factors.
        statistics: its layer's forward moves it in training, no solver does.
    """

    name: str
    shape: Shape
    lr_mult: float
    decay_mult: float
    parameter: nn.Parameter
    layer: str
    layer_type: str
    factors: bool
    statistics: bool = False


@dataclass(slots=True)
class Owned:
    """A blob while the net is being compiled; later sharers may still set its multipliers."""

    layer: str
    layer_type: str
    index: int
    shape: Shape
    lr_mult: float | None
    decay_mult: float | None
    factors: bool
    statistics: bool
    parameter: nn.Parameter | None = None

    @property
    def name(self) -> str:
        """`<owner layer>.<blob index>`."""
        return f"{self.layer}.{self.index}"


class ParamTable:
    """Collects blobs layer by layer, in order."""

    def __init__(self) -> None:
        self.owned: list[Owned] = []
        self._by_name: dict[str, Owned] = {}
        self._layers: set[str] = set()

    def add_layer(
        self, param: LayerParameter, specs: tuple[BlobSpec, ...], *, factors: bool, statistics: bool = False
    ) -> list[Owned]:
        """Take in the blobs of the next layer.

        Args:
            param: its definition.
            specs: the blobs it declared.
            factors: whether its first blob may travel as factors.
            statistics: whether it moves the blobs that do not learn.

        Returns:
            for each blob its entry: a new one, or the one it shares.

        Raises:
            LayerError: more param specs than blobs, a name that is taken, or sharers that disagree.
        """
        if len(param.param) > len(specs):
            raise LayerError(
                f"has {counted(len(param.param), 'param spec')}, expected at most {len(specs)}: it has {counted(len(specs), 'blob')}"
            )
        if specs and param.name in self._layers:
            raise LayerError("another layer with blobs has the same name, expected a name of its own")
        if specs:
            self._layers.add(param.name)
        unset = ParamSpec()
        entries = []
        for index, spec in enumerate(specs):
            given = param.param[index] if index < len(param.param) else unset
            entry = self._add(param, index, spec, given, factors)
            entry.statistics |= statistics and not spec.learns
            entries.append(entry)
        return entries

    def _add(
        self, param: LayerParameter, index: int, spec: BlobSpec, given: ParamSpec, factors: bool
    ) -> Owned:
        if given.name and given.name in self._by_name:
            owner = self._by_name[given.name]
            _check_share(owner, spec.shape, given)
            owner.factors = False
            return owner
        if not spec.learns and given != ParamSpec() and given.lr_mult != 0:
            raise LayerError(
                f"blob {index} holds statistics, which no solver moves; expected lr_mult: 0 for it"
            )
        entry = Owned(
            layer=param.name,
            layer_type=param.type,
            index=index,
            shape=spec.shape,
            lr_mult=(given.lr_mult if given.HasField("lr_mult") else None) if spec.learns else 0.0,
            decay_mult=given.decay_mult if given.HasField("decay_mult") else None,
            factors=factors and index == 0,
            statistics=False,
        )
        self.owned.append(entry)
        if given.name:
            self._by_name[given.name] = entry
        return entry

    def infos(self) -> tuple[ParamInfo, ...]:
        """Return every tensor in Caffe's learnable order; each entry has its parameter by now."""
        return tuple(_info(entry) for entry in self.owned)


def multiplier(value: float | None) -> float:
    """Return a multiplier, 1 where nobody set it."""
    return 1.0 if value is None else value


def _info(entry: Owned) -> ParamInfo:
    assert entry.parameter is not None
    return ParamInfo(
        name=entry.name,
        shape=entry.shape,
        lr_mult=multiplier(entry.lr_mult),
        decay_mult=multiplier(entry.decay_mult),
        parameter=entry.parameter,
        layer=entry.layer,
        layer_type=entry.layer_type,
        factors=entry.factors,
        statistics=entry.statistics,
    )


def _check_share(owner: Owned, shape: Shape, given: ParamSpec) -> None:
    """Raise `LayerError` unless a blob of `shape` may be the owner's, and take over the multipliers it sets."""
    place = f"param '{given.name}', shared with layer '{owner.layer}',"
    if given.share_mode == ParamSpec.PERMISSIVE:
        if math.prod(shape) != math.prod(owner.shape):
            raise LayerError(f"{place} has {math.prod(shape)} values, expected {math.prod(owner.shape)}")
    elif shape != owner.shape:
        raise LayerError(f"{place} has shape {times(shape)}, expected {times(owner.shape)}")
    owner.lr_mult = _agree(
        place, "lr_mult", owner.lr_mult, given.lr_mult if given.HasField("lr_mult") else None
    )
    decay_mult = given.decay_mult if given.HasField("decay_mult") else None
    owner.decay_mult = _agree(place, "decay_mult", owner.decay_mult, decay_mult)


def _agree(place: str, name: str, first: float | None, second: float | None) -> float | None:
    """Return the multiplier two sharers agree on."""
    if first is not None and second is not None and first != second:
        raise LayerError(f"{place} has {name} {second:g}, expected {first:g} as there")
    return second if first is None else first
