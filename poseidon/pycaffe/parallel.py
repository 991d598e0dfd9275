"""Synchronous data-parallel training with a solver in each process, without NCCL.

A script of `poseidon run` needs no address, rank or count (`poseidon.pycaffe.job`). By hand:

    caffe.set_solver_count(2)                       # in each process
    caffe.set_solver_rank(rank)                     # before the solver is created: data layers select records by rank
    solver = caffe.get_solver("solver.prototxt")
    group = caffe.Gloo(solver, "tcp://127.0.0.1:29500")
    group.bcast()                                   # all start from rank 0's weights
    solver.add_callback(group)                      # diffs are averaged before each update
    solver.step(100)
    group.close()

Law: after `bcast` all processes have the same weights, and after each iteration too, because each
applies the same mean of all diffs. They are added in the tree of virtual workers
(`ps_server/protocol/virtual_workers.py`), so bits do not depend on the number of processes, if
`set_virtual_workers` has set the number of virtual workers. `poseidon train` also has overlap,
staleness and supervision, and is recommended for large jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import NoReturn

import torch
from torch import Tensor, distributed
from torch.nn import functional

from poseidon.caffe.tools.benchmark import clock_of
from poseidon.engine.this_process import current_context
from poseidon.errors import JobError, UsageError
from poseidon.pycaffe.job import JobMember
from poseidon.pycaffe.mode import MODE
from poseidon.pycaffe.solver import Solver
from ps_server.protocol.virtual_workers import Node, TreeSum

NO_NCCL = (
    "there is no NCCL here (has_nccl() is False); use caffe.Gloo, or `poseidon train` (see "
    "docs/pycaffe.md)"
)
NO_ADDRESS = (
    "caffe.Gloo(solver) without an address is for scripts of `poseidon run`; write "
    "caffe.Gloo(solver, 'tcp://HOST:PORT')"
)


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
            disk. A job of `poseidon run` connects its solvers itself, and ignores it.

    Raises:
        JobError: the other processes cannot be reached.
        UsageError: there is no address, or the solver does not fit its job.
    """

    def __init__(self, solver: Solver, address: str = "") -> None:
        self._contributions = solver._contributions
        context = current_context()
        self._job = JobMember(solver, context) if context.folder is not None else None
        if self._job is not None:
            return
        if not address:
            raise UsageError(NO_ADDRESS)
        self._blobs = [blob for _, blob in solver.net._built.learned_blobs()]
        placed, rank = self._contributions.placed, self._contributions.process
        try:
            distributed.init_process_group(
                "gloo", init_method=address, rank=rank, world_size=placed.processes
            )
        except (RuntimeError, ValueError) as error:
            raise JobError(
                f"process {rank} of {placed.processes} cannot join the others at {address}: {error}"
            ) from error

    def bcast(self) -> None:
        """Broadcast the weights and statistics of rank 0 to all processes. In a job that continues
        from memory the solver then has the whole state of its snapshot, also `iter`.
        """
        if self._job is not None:
            self._job.bcast()
            return
        values = [blob.write_data() for blob in self._blobs]
        flat = torch.cat([value.reshape(-1).cpu() for value in values])
        distributed.broadcast(flat, src=0)
        for value, part in zip(values, flat.split([v.numel() for v in values]), strict=True):
            value.copy_(part.view(value.shape))

    def __call__(self, layer: int) -> None:
        """Do nothing after a layer's backward pass: `net.after_backward(group)`, which scripts that
        reduce layer by layer call with NCCL, may stay. The diffs are averaged after the last layer.
        """

    def on_start(self) -> None:
        """Do nothing before the forward pass."""

    def on_gradients_ready(self) -> None:
        """Average all diffs over all virtual workers, before the update, and the statistics."""
        if self._job is not None:
            self._job.average()
        else:
            self._contributions.average(self._total)

    def close(self) -> None:
        """Leave the group. A second call does nothing."""
        if self._job is not None:
            self._job.leave()
        elif distributed.is_initialized():
            distributed.destroy_process_group()

    def _total(self, sums: Mapping[Node, Tensor]) -> Tensor:
        """Return the sum over all virtual workers. Process p adds the p-th slice of all sums."""
        placed, rank = self._contributions.placed, self._contributions.process
        size = next(iter(sums.values())).numel()
        width = max(1, -(-size // placed.processes))
        nodes = [placed.nodes(process) for process in range(placed.processes)]
        padded = [
            functional.pad(sums[node], (0, width * placed.processes - size)).view(-1, width)
            for node in nodes[rank]
        ]
        # processes x own nodes x width: the slices of each receiver, one after another
        sent = torch.stack(padded, dim=1)
        counts = [len(of) * width for of in nodes]
        received = torch.empty(sum(counts))
        distributed.all_to_all_single(
            received.view(-1), sent.view(-1), counts, [sent[0].numel()] * placed.processes
        )
        tree: TreeSum[Tensor] = TreeSum(placed.count)
        for node, part in zip(chain(*nodes), received.view(-1, width), strict=True):
            tree.put(node, part)
        (own,) = tree.parts.values()
        total = torch.empty(placed.processes, width)
        distributed.all_gather(list(total.unbind()), own.contiguous())
        return total.view(-1)[:size]


class Timer:
    """A stopwatch that waits for the work of the device which is chosen when it is created."""

    def __init__(self) -> None:
        self._clock = clock_of(MODE.device)
        self._began_s: float | None = None
        self._elapsed_s = 0.0

    def start(self) -> None:
        """Begin; while it runs, do nothing."""
        if self._began_s is None:
            self._began_s = self._clock()

    def stop(self) -> None:
        """Stop; if it does not run, do nothing."""
        if self._began_s is not None:
            self._elapsed_s, self._began_s = self._clock() - self._began_s, None

    @property
    def ms(self) -> float:
        """Milliseconds from the last start to its stop, which this is while it runs; 0 before."""
        self.stop()
        return self._elapsed_s * 1000
