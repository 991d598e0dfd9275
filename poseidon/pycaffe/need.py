"""Which layers run backward, and to which bottoms: the second half of Caffe's Net::Init.

Law: pure; names and facts in, flags out. A layer runs backward when it or a layer below it learns, and something above
it weighs in a loss; `propagate_down` may force or stop single bottoms, and `force_backward` runs everything that can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Bottoms that even force_backward leaves alone (Caffe's AllowForceBackward): labels and the like.
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
class Facts:
    """What is known of a layer before it is asked for gradients.

    Attributes:
        kind: its type.
        bottoms: names.
        tops: names, those that Caffe adds by itself too.
        propagate_down: as given, empty if not.
        learns: any of its blobs has a rate.
        weighs: for each top, whether it weighs in the loss.
    """

    kind: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    propagate_down: tuple[bool, ...]
    learns: bool
    weighs: tuple[bool, ...]


@dataclass(slots=True)
class Need:
    """Whether a layer runs backward, and which bottoms get a gradient."""

    backward: bool
    bottoms: list[bool] = field(default_factory=list)


def needs(layers: Sequence[Facts], *, force: bool) -> list[Need]:
    """Return the flags of every layer, in order.

    Args:
        layers: in the order of the net, splits included.
        force: the net's force_backward.
    """
    found = _forward(layers)
    _drop_what_moves_no_loss(layers, found)
    if force:
        for layer, need in zip(layers, found, strict=True):
            need.backward = True
            never = NEVER_FORCED.get(layer.kind, frozenset())
            need.bottoms = [have or place not in never for place, have in enumerate(need.bottoms)]
    return found


def _forward(layers: Sequence[Facts]) -> list[Need]:
    """Bottom up: what lies above something that learns."""
    blobs: dict[str, bool] = {}
    found = []
    for layer in layers:
        below = [blobs.get(name, False) for name in layer.bottoms]
        backward = any(below) or layer.learns
        bottoms = list(layer.propagate_down) or below
        found.append(Need(backward, bottoms))
        blobs |= dict.fromkeys(layer.tops, backward)
    return found


def _drop_what_moves_no_loss(layers: Sequence[Facts], found: list[Need]) -> None:
    """Top down: drop the layers that no loss hangs on, and those whose tops nobody propagates to."""
    under_loss: set[str] = set()
    skipped: set[str] = set()
    for layer, need in zip(reversed(layers), reversed(found), strict=True):
        contributes, skip = False, True
        for name, weighs in zip(layer.tops, layer.weighs, strict=True):
            contributes |= weighs or name in under_loss
            skip &= name in skipped
            if contributes and not skip:
                break
        if need.backward and skip:
            need.backward = False
            need.bottoms = [False] * len(need.bottoms)
        if contributes:
            under_loss.update(layer.bottoms)
        else:
            need.backward = False
            need.bottoms = [False] * len(need.bottoms)
        skipped.update(name for name, want in zip(layer.bottoms, need.bottoms, strict=True) if not want)
