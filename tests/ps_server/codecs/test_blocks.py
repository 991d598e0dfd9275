"""The bytes of int8, int4 and sign by hand."""

from __future__ import annotations

import numpy as np

from ps_server.codecs.blocks import BLOCK
from tests.support.codecs import decoded, encoded


def test_int8_has_a_scale_and_rounds_to_even() -> None:
    exact = np.array([127, -127, 1.5, 2.5, -0.5, 0.4], np.float32)
    data = encoded("int8", exact)
    assert data[:4].view("<f4") == 1.0
    assert data[4:10].view(np.int8).tolist() == [127, -127, 2, 2, 0, 0]
    assert data[10:].tolist() == [0, 0]  # to a multiple of 4
    assert decoded("int8", data, 6).tolist() == [127, -127, 2, 2, 0, 0]


def test_each_block_of_int8_has_its_own_scale() -> None:
    exact = np.repeat(np.array([1e6, 1e-6, 0], np.float32), [BLOCK, BLOCK, 2])
    data = encoded("int8", exact)
    np.testing.assert_allclose(data[:12].view("<f4"), [1e6 / 127, 1e-6 / 127, 0], rtol=1e-6)
    np.testing.assert_allclose(decoded("int8", data, exact.size), exact, rtol=1e-6)


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


def test_sign_has_a_bit_and_the_mean_magnitude() -> None:
    exact = np.array([4, -2, 0, -6, 1, 1, 1, 1, -8], np.float32)
    data = encoded("sign", exact)
    assert data[:4].view("<f4") == 24 / 9
    assert data[4:].tolist() == [0b1010, 1, 0, 0]
    mean = float(np.float32(24 / 9))
    assert decoded("sign", data, 9).tolist() == [mean * s for s in (1, -1, 1, -1, 1, 1, 1, 1, -1)]
