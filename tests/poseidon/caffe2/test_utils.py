"""Orders of the axes of arrays of images."""

from __future__ import annotations

import io

import numpy as np
import pytest

from poseidon.caffe2 import utils


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ((2, 3), (2, 3)),
        ((2, 3, 4), (2, 4, 3)),
        ((2, 3, 4, 5), (2, 4, 5, 3)),
        ((2, 3, 4, 5, 6), (2, 4, 5, 6, 3)),
    ],
)
def test_channels_move_to_the_end_and_back(first: tuple[int, ...], last: tuple[int, ...]) -> None:
    images = np.arange(np.prod(first)).reshape(first)
    moved = utils.NCHW2NHWC(images)
    assert moved.shape == last
    assert moved[1, ..., 2].tolist() == images[1, 2].tolist()
    np.testing.assert_array_equal(utils.NHWC2NCHW(moved), images)


def test_a_function_in_debug_mode_returns_and_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    assert utils.debug(lambda a, b: a + b)(1, b=2) == 3
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(ZeroDivisionError):
        utils.debug(lambda: 1 / 0)()
