"""Which layers run backward: Caffe's rules on small nets."""

from __future__ import annotations

import pytest

from poseidon.pycaffe.nodes import LayerInfo, backward_flags


def fact(
    bottoms: str,
    tops: str,
    *,
    kind: str = "",
    down: tuple[bool, ...] = (),
    learns: bool = False,
    loss: bool = False,
) -> LayerInfo:
    names = tuple(tops.split())
    return LayerInfo(
        kind=kind,
        bottoms=tuple(bottoms.split()),
        tops=names,
        propagate_down=down,
        learns=learns,
        in_loss=(loss,) * len(names),
    )


DATA = fact("", "x l")
LOSS = fact("y l", "loss", kind="SoftmaxWithLoss", loss=True)
LEARNING = fact("x", "y", learns=True)


SIDE = [fact("y", "a b"), fact("a", "side"), fact("b l", "loss", loss=True)]
STOPPED = [fact("y", "z", down=(False,)), fact("z l", "loss", loss=True)]


@pytest.mark.parametrize(
    ("layers", "force", "backward", "bottoms"),
    [
        ([DATA, LEARNING, LOSS], False, [0, 1, 1], [[], [0], [1, 0]]),
        ([DATA, fact("x", "y"), LOSS], False, [0, 0, 0], [[], [0], [0, 0]]),  # nothing learns
        ([DATA, LEARNING], False, [0, 0], [[], [0]]),  # no loss
        ([DATA, LEARNING, LOSS], True, [1, 1, 1], [[], [1], [1, 0]]),  # forced, but for labels
        ([DATA, LEARNING], True, [1, 1], [[], [1]]),
        ([DATA, LEARNING, *SIDE], False, [0, 1, 1, 0, 1], [[], [0], [1], [0], [1, 0]]),
        ([DATA, LEARNING, *STOPPED], False, [0, 0, 1, 1], [[], [0], [0], [1, 0]]),
        (  # asked for by propagate_down
            *([DATA, fact("x", "y", down=(True,), learns=True), LOSS], False),
            *([0, 1, 1], [[], [1], [1, 0]]),
        ),
    ],
)
def test_backward_flags(
    layers: list[LayerInfo], force: bool, backward: list[int], bottoms: list[list[int]]
) -> None:
    found = backward_flags(layers, force=force)
    assert [int(need.backward) for need in found] == backward
    assert [[int(flag) for flag in need.bottoms] for need in found] == bottoms
