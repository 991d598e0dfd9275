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


@pytest.mark.parametrize(
    ("layers", "force", "backward", "bottoms"),
    [
        pytest.param(
            [DATA, LEARNING, LOSS], False, [0, 1, 1], [[], [0], [1, 0]], id="learns below a loss"
        ),
        pytest.param(
            [DATA, fact("x", "y"), LOSS], False, [0, 0, 0], [[], [0], [0, 0]], id="nothing learns"
        ),
        pytest.param([DATA, LEARNING], False, [0, 0], [[], [0]], id="no loss"),
        pytest.param(
            [DATA, LEARNING, LOSS], True, [1, 1, 1], [[], [1], [1, 0]], id="forced, but for labels"
        ),
        pytest.param([DATA, LEARNING], True, [1, 1], [[], [1]], id="forced without a loss"),
        pytest.param(
            [DATA, LEARNING, fact("y", "a b"), fact("a", "side"), fact("b l", "loss", loss=True)],
            False,
            [0, 1, 1, 0, 1],
            [[], [0], [1], [0], [1, 0]],
            id="a side branch",
        ),
        pytest.param(
            [DATA, LEARNING, fact("y", "z", down=(False,)), fact("z l", "loss", loss=True)],
            False,
            [0, 0, 1, 1],
            [[], [0], [0], [1, 0]],
            id="stopped by propagate_down",
        ),
        pytest.param(
            [DATA, fact("x", "y", down=(True,), learns=True), LOSS],
            False,
            [0, 1, 1],
            [[], [1], [1, 0]],
            id="asked for by propagate_down",
        ),
    ],
)
def test_backward_flags(
    layers: list[LayerInfo], force: bool, backward: list[int], bottoms: list[list[int]]
) -> None:
    found = backward_flags(layers, force=force)
    assert [int(need.backward) for need in found] == backward
    assert [[int(flag) for flag in need.bottoms] for need in found] == bottoms
