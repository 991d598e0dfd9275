"""The layers that run backward, and the bottoms that get a gradient, as in the second half of
Caffe's Net::Init.

Law: no I/O. A layer runs backward if it or a layer below it learns, and it or a layer above it
contributes to a loss. `propagate_down` forces or stops single bottoms; `force_backward` runs all
layers that can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Bottoms, such as labels, that force_backward does not affect (Caffe's AllowForceBackward).
NEVER_FORCED: dict[str, frozenset[int]] = {
    "ContrastiveLoss": frozenset({2}),
    "HingeLoss": frozenset({1}),
    "InfogainLoss": frozenset({1}),
    "LSTM": frozenset({1}),
    "LSTMUnit": frozenset({2}),
    "MultinomialLogisticLoss": frozenset({1}),
    "RNN": frozenset({1}),
    "Recurrent": frozenset({1}),
    "SigmoidCrossEntropyLoss": frozenset({1}),
    "SoftmaxWithLoss": frozenset({1}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInfo:
    """The properties of a layer that decide about gradients.

    Attributes:
        tops: the names of the tops, including those that Caffe adds automatically.
        propagate_down: the setting in the definition, possibly empty.
        learns: whether any of its blobs has a learning rate.
        in_loss: for each top, whether it has a loss weight.
    """

    kind: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    propagate_down: tuple[bool, ...]
    learns: bool
    in_loss: tuple[bool, ...]


@dataclass(slots=True)
class BackwardFlags:
    """The flags of a layer: whether it runs backward, and which bottoms get a gradient."""

    backward: bool
    bottoms: list[bool]


def backward_flags(layers: Sequence[LayerInfo], *, force: bool) -> list[BackwardFlags]:
    """Return the flags of every layer, in order.

    Args:
        layers: the layers in the order of the net, including splits.
        force: the net's force_backward.
    """
    found = _forward(layers)
    _clear_outside_loss(layers, found)
    if force:
        for layer, flags in zip(layers, found, strict=True):
            flags.backward = True
            never = NEVER_FORCED.get(layer.kind, frozenset())
            flags.bottoms = [flag or index not in never for index, flag in enumerate(flags.bottoms)]
    return found


def _forward(layers: Sequence[LayerInfo]) -> list[BackwardFlags]:
    """Set the flags of layers that learn, and of all layers above them, from the first layer to
    the last.
    """
    blobs: dict[str, bool] = {}
    found = []
    for layer in layers:
        below = [blobs.get(name, False) for name in layer.bottoms]
        backward = any(below) or layer.learns
        bottoms = list(layer.propagate_down) or below
        found.append(BackwardFlags(backward, bottoms))
        blobs |= dict.fromkeys(layer.tops, backward)
    return found


def _clear_outside_loss(layers: Sequence[LayerInfo], found: list[BackwardFlags]) -> None:
    """Clear the flags of layers that contribute to no loss or whose tops get no
    gradient, from the last layer to the first.
    """
    under_loss: set[str] = set()
    skipped: set[str] = set()
    for layer, flags in zip(reversed(layers), reversed(found), strict=True):
        contributes, skip = False, True
        for name, in_loss in zip(layer.tops, layer.in_loss, strict=True):
            contributes |= in_loss or name in under_loss
            skip &= name in skipped
            if contributes and not skip:
                break
        if flags.backward and skip:
            flags.backward = False
            flags.bottoms = [False] * len(flags.bottoms)
        if contributes:
            under_loss.update(layer.bottoms)
        else:
            flags.backward = False
            flags.bottoms = [False] * len(flags.bottoms)
        skipped.update(
            name for name, flag in zip(layer.bottoms, flags.bottoms, strict=True) if not flag
        )
