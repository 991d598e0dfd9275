"""cifar10_quick as shipped: two clients with batch 50 compute what one process computes.

Against one process that takes the same hundred records as two passes of fifty (`iter_size: 2`),
every bit agrees, after any number of iterations.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.prepare.convert import Labelled, write_labelled
from tests.support.cifar10 import make_pictures, shipped_solver
from tests.support.training import Job, run, weights

BATCH = 100
PICTURES = 600  # read through more than once

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training set of generated images; in `passes_lmdb` each hundred has its even records
    first, then the odd ones.
    """
    folder = tmp_path_factory.mktemp("cifar10")
    pictures = make_pictures(folder, PICTURES)
    order = np.arange(PICTURES).reshape(-1, BATCH // 2, 2).transpose(0, 2, 1).reshape(-1)
    dealt = Labelled(images=pictures.images[order], labels=pictures.labels[order])
    write_labelled(folder / "passes_lmdb", Backend.LMDB, dealt, key_digits=5)
    return folder


@pytest.mark.parametrize("iterations", [4, pytest.param(50, marks=pytest.mark.thorough)])
def test_two_clients_have_the_bits_of_one_process_with_two_passes(
    repository: Path, data: Path, tmp_path: Path, iterations: int
) -> None:
    one = shipped_solver(
        repository,
        data / "passes_lmdb",
        tmp_path / "one",
        batch=50,
        iterations=iterations,
        iter_size=2,
    )
    run(one, Job())
    expected = weights(tmp_path / "one", iterations)
    two = shipped_solver(
        repository, data / "train_lmdb", tmp_path / "two", batch=50, iterations=iterations
    )
    run(two, Job(workers=2, shards=3))
    for a, b in zip(weights(tmp_path / "two", iterations), expected, strict=True):
        assert np.array_equal(a, b)
