"""The bytes of int4 by hand."""

from __future__ import annotations

import numpy as np

from tests.support.codecs import decoded, encoded


def test_int4_has_a_scale_and_two_elements_in_a_byte() -> None:
    exact = np.array([7, -7, 1.5, 2.5, -0.5], np.float32)
    data = encoded("int4", exact)
    assert data[:4].view("<f4") == 1.0
    assert data[4:].tolist() == [0x1F, 0xAA, 0x08, 0]  # 8 is 0
    assert decoded("int4", data, 5).tolist() == [7, -7, 2, 2, 0]


def test_each_block_of_int4_has_its_own_scale() -> None:
    exact = np.repeat(np.array([7e6, 7e-6, 0], np.float32), [64, 64, 3])
    data = encoded("int4", exact)
    np.testing.assert_allclose(data[:12].view("<f4"), [1e6, 1e-6, 0], rtol=1e-6)
    np.testing.assert_allclose(decoded("int4", data, exact.size), exact, rtol=1e-6)
