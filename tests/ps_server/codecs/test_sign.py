"""The bytes of sign by hand."""

from __future__ import annotations

import numpy as np

from tests.support.codecs import decoded, encoded


def test_sign_has_a_bit_and_the_mean_magnitude() -> None:
    exact = np.array([4, -2, 0, -6, 1, 1, 1, 1, -8], np.float32)
    data = encoded("sign", exact)
    assert data[:4].view("<f4") == 24 / 9
    assert data[4:].tolist() == [0b1010, 1, 0, 0]
    mean = float(np.float32(24 / 9))
    assert decoded("sign", data, 9).tolist() == [mean * s for s in (1, -1, 1, -1, 1, 1, 1, 1, -1)]
