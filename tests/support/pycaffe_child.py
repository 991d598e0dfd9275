"""One of several processes that train together: `python -m tests.support.pycaffe_child RANK
COUNT ADDRESS SOLVER OUT`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import poseidon.pycaffe as caffe


def train(solver_file: Path, *, rank: int, count: int, address: str) -> list[np.ndarray]:
    """Return the weights after four iterations over this process's part of the records."""
    caffe.set_solver_count(count)
    caffe.set_solver_rank(rank)
    caffe.set_random_seed(rank)  # first weights differ until they are broadcast
    solver = caffe.get_solver(solver_file)
    group = caffe.Gloo(solver, address)
    group.bcast()
    solver.add_callback(group)
    draws = np.random.default_rng(0)
    for _ in range(4):
        x, labels = draws.normal(size=(8, 5)), draws.integers(0, 4, size=8)
        solver.net.blobs["x"].data[...] = x[rank::count]
        solver.net.blobs["l"].data[...] = labels[rank::count]
        solver.step(1)
    group.close()
    return [blob.data.copy() for blobs in solver.net.params.values() for blob in blobs]


if __name__ == "__main__":
    rank, count, address, solver_file, out = sys.argv[1:]
    np.savez(out, *train(Path(solver_file), rank=int(rank), count=int(count), address=address))
