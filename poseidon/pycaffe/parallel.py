"""Synchronous data-parallel training with a solver in each process, without NCCL.

    caffe.set_solver_count(2)                       # in each process
    caffe.set_solver_rank(rank)                     # before the solver is created: data layers select records by rank
    solver = caffe.get_solver("solver.prototxt")
    group = caffe.Gloo(solver, "tcp://127.0.0.1:29500")
    group.bcast()                                   # all start from rank 0's weights
    solver.add_callback(group)                      # diffs are averaged before each update
    solver.step(100)
    group.close()

Law: after `bcast` all processes have the same weights, and after each iteration too, because each
applies the same mean of all diffs. `poseidon train` also has overlap, staleness and supervision,
and is recommended for large jobs.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, distributed

from poseidon.errors import JobError, UsageError
from poseidon.layers.blob import Blob
from poseidon.pycaffe.mode import solver_count, solver_rank
from poseidon.pycaffe.solver import Solver

NO_NCCL = "NCCL is not used here: has_nccl() is False; expected caffe.Gloo, or `poseidon train` (see docs/pycaffe.md)"


class NCCL:
    """Caffe's class of this name, which is not available; its constructor raises an error that
    says what to use.
    """

    def __init__(self, *_: object) -> None:
        raise UsageError(NO_NCCL)

    @staticmethod
    def new_uid() -> NoReturn:
        """Raise UsageError."""
        raise UsageError(NO_NCCL)


class Gloo:
    """The process group of the solvers, and a callback for `Solver.add_callback`.

    Args:
        solver: a solver created after `set_solver_count` and `set_solver_rank`.
        address: the rendezvous: `tcp://<host of rank 0>:<port>`, or `file://<path>` on a shared
            disk.

    Raises:
        JobError: the other processes cannot be reached.
    """

    def __init__(self, solver: Solver, address: str) -> None:
        self._blobs = _owned(solver)
        self._count = solver_count()
        try:
            distributed.init_process_group(
                "gloo", init_method=address, rank=solver_rank(), world_size=self._count
            )
        except (RuntimeError, ValueError) as error:
            raise JobError(
                f"process {solver_rank()} of {self._count} cannot join the others at {address}: "
                f"{error}"
            ) from error

    def bcast(self) -> None:
        """Broadcast the weights of rank 0 to all processes."""
        values = [blob.write_data() for blob in self._blobs]
        flat = _flatten(values)
        distributed.broadcast(flat, src=0)
        _unflatten(flat, values)

    def on_start(self) -> None:
        """Do nothing before the forward pass."""

    def on_gradients_ready(self) -> None:
        """Average all diffs over all processes, before the update."""
        diffs = [blob.write_diff() for blob in self._blobs]
        flat = _flatten(diffs)
        distributed.all_reduce(flat)
        _unflatten(flat.div_(self._count), diffs)

    def close(self) -> None:
        """Leave the group. A second call does nothing."""
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _owned(solver: Solver) -> list[Blob]:
    """Return all learnable blobs, shared ones once."""
    found: dict[int, Blob] = {}
    for blobs in solver.net.params.values():
        for blob in blobs:
            found.setdefault(id(blob.data_memory()), blob)
    return list(found.values())


def _flatten(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).cpu() for tensor in tensors])


def _unflatten(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, part in zip(
        tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
    ):
        tensor.copy_(part.view(tensor.shape))
