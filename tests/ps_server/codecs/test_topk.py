"""The bytes of topk by hand, and those that no encoder sends."""

from __future__ import annotations

import numpy as np
import pytest

from ps_server import RemoteProtocolError
from ps_server.codecs.base import SEGMENT_ELEMENTS
from tests.support.codecs import decoded, encoded, numbers


def test_topk_has_positions_and_elements_and_the_lower_of_equal_ones() -> None:
    exact = np.array([0, -3, 1, 3, 3, 0, -3, 2], np.float32)
    data = encoded("topk:0.375", exact)
    assert data[:6].view("<u2").tolist() == [1, 3, 4]
    assert data[6:8].tolist() == [0, 0]
    assert data[8:].view("<f4").tolist() == [-3, 3, 3]
    assert decoded("topk:0.375", data, 8).tolist() == [0, -3, 0, 3, 3, 0, 0, 0]


def test_each_segment_has_its_own_largest() -> None:
    exact = np.zeros(2 * SEGMENT_ELEMENTS + 1_000, np.float32)
    places = [5, SEGMENT_ELEMENTS + 6, 2 * SEGMENT_ELEMENTS + 7]
    exact[places] = [1e-3, 1, -1e3]
    assert (
        np.flatnonzero(decoded("topk:0.0001", encoded("topk:0.0001", exact), exact.size)).tolist()
        == places
    )


@pytest.mark.parametrize(
    "positions",
    [[3, 3], [4, 3], [3, 8], [65_535, 3], [0, 65_535]],
    ids=["twice", "back", "outside", "far first", "far last"],
)
def test_positions_that_no_encoder_sends_are_refused(positions: list[int]) -> None:
    data = encoded("topk:0.25", numbers(8))
    data[:4].view("<u2")[:] = positions
    with pytest.raises(RemoteProtocolError, match="do not increase"):
        decoded("topk:0.25", data, 8)
