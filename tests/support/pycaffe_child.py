"""One of several processes that train together: `python -m tests.support.pycaffe_child RANK
COUNT VIRTUAL ADDRESS SOLVER OUT`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import poseidon.pycaffe as caffe

RECORDS = 10
"""Of an iteration, which the virtual workers divide."""


def train(
    solver_file: Path, *, rank: int, count: int, virtual: int, address: str
) -> list[np.ndarray]:
    """Return the weights and statistics after four iterations over this process's part of the
    records.
    """
    caffe.set_solver_count(count)
    caffe.set_solver_rank(rank)
    caffe.set_virtual_workers(virtual)
    solver = caffe.get_solver(solver_file)
    if rank:  # first weights differ until they are broadcast
        for blobs in solver.net.params.values():
            for blob in blobs:
                blob.data[...] += 1
    group = caffe.Gloo(solver, address)
    group.bcast()
    solver.add_callback(group)
    if solver.param.layer_wise_reduce:  # as in Caffe's python/train.py
        solver.net.after_backward(group)
    draws = np.random.default_rng(0)
    first = rank * virtual // count + (rank > 0 and virtual % count > 0)
    for _ in range(4):
        x, labels = draws.normal(size=(RECORDS, 5)), draws.integers(0, 4, size=RECORDS)
        for number, net in enumerate(solver.nets, start=first):
            net.blobs["x"].data[...] = x[number::virtual]
            net.blobs["l"].data[...] = labels[number::virtual]
        solver.step(1)
    group.close()
    return [blob.data.copy() for blobs in solver.net.params.values() for blob in blobs]


if __name__ == "__main__":
    rank, count, virtual, address, solver_file, out = sys.argv[1:]
    found = train(
        Path(solver_file), rank=int(rank), count=int(count), virtual=int(virtual), address=address
    )
    np.savez(out, *found)
