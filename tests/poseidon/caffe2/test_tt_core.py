"""Tensor trains of random cores and of matrices."""

from __future__ import annotations

import numpy as np

from poseidon.caffe2 import tt_core
from tests.support.caffe2_operators import numbers


def test_random_cores_have_their_sizes_and_repeat() -> None:
    cores = tt_core.init_tt_cores([2, 3], [3, 2], [1, 4, 1])
    assert cores.dtype == np.float32
    assert cores.shape == (2 * 3 * 4 + 4 * 3 * 2,)
    np.testing.assert_array_equal(cores, tt_core.init_tt_cores([2, 3], [3, 2], [1, 4, 1]))


def test_a_tensor_of_rank_one_needs_ranks_of_one() -> None:
    parts = [numbers(3), numbers(2, seed=1), numbers(4, seed=2)]
    tensor = np.einsum("i,j,k->ijk", *parts)
    cores = tt_core.tt_svd(tensor, [3, 2, 4], [1, 1, 1, 1])
    np.testing.assert_allclose(np.einsum("aib,bjc,ckd->ijk", *cores), tensor, rtol=1e-5)
