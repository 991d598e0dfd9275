"""Process-wide settings: device, random seed, solver rank and count, log.

Law: this is the only global state of the package; pycaffe's functions such as
`caffe.set_mode_gpu()` require it. A net copies the settings when it is created; later calls do not
change existing nets.
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from poseidon.base import glog
from poseidon.caffe.layers.base import CPU, LayerContext
from poseidon.caffe.layers.registry import known_types
from poseidon.caffe.net.params import derive_seed
from poseidon.caffe.proto.definition import NetDefinition
from poseidon.caffe.solver.replica import draws_from_process
from poseidon.engine.random_streams import seed_generators
from poseidon.engine.this_process import compute_as_everywhere, current_context, this_worker
from poseidon.errors import UsageError, counted
from ps_server.numerics import let_forks_compute
from ps_server.protocol.seats import Seat
from ps_server.protocol.settings import MAX_WORKERS
from ps_server.protocol.virtual_workers import VirtualWorkers

LOGGER = logging.getLogger("poseidon.pycaffe")
# glog's severities 0 to 3.
LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


@dataclass(slots=True)
class ProcessMode:
    """The settings of the process.

    Attributes:
        device: the device of the next net.
        gpu: the number of the GPU for `set_mode_gpu`.
        seed: the seed from which the seeds of the next nets are derived; None: random seeds.
        nets: the number of nets created since the seed was set.
        rank: the rank of this process among `count`; None: its rank in its job, or 0.
        count: the number of processes that train together; None: the number in its job, or 1.
        virtual_workers: the number that these compute for; None: one each.
    """

    device: torch.device = CPU
    gpu: int = 0
    seed: int | None = None
    nets: int = 0
    rank: int | None = None
    count: int | None = None
    virtual_workers: int | None = None


MODE = ProcessMode()
let_forks_compute()
_LOG: list[glog.LogOutputs] = []


def set_mode_cpu() -> None:
    """Compute on the CPU."""
    MODE.device = CPU


def set_mode_gpu() -> None:
    """Compute on the GPU of `set_device`, by default number 0.

    Raises:
        UsageError: there is no such CUDA device.
    """
    _check_gpu(MODE.gpu)
    MODE.device = torch.device("cuda", MODE.gpu)


def set_device(gpu: int) -> None:
    """Set the GPU for `set_mode_gpu`.

    Raises:
        UsageError: there is no such CUDA device.
    """
    _check_gpu(gpu)
    MODE.gpu = gpu
    if MODE.device.type == "cuda":
        MODE.device = torch.device("cuda", gpu)


def set_random_seed(seed: int) -> None:
    """Set the random seed for the nets that are created from now on."""
    MODE.seed = int(seed)
    MODE.nets = 0


def solver_count() -> int:
    """Return the number of processes that train together."""
    return this_worker().size if MODE.count is None else MODE.count


def set_solver_count(count: int) -> None:
    """Set the number of processes that train together.

    Data layers that are created from now on share their records.

    Raises:
        UsageError: the count is below 1.
    """
    if count < 1:
        raise UsageError(f"solver count {count}: expected 1 or more")
    MODE.count = count


def solver_rank() -> int:
    """Return the rank of this process, from 0."""
    return this_worker().rank if MODE.rank is None else MODE.rank


def set_solver_rank(rank: int) -> None:
    """Set the rank of this process.

    Raises:
        UsageError: the rank is negative.
    """
    if rank < 0:
        raise UsageError(f"solver rank {rank}: expected 0 or more")
    MODE.rank = rank


def set_virtual_workers(count: int) -> None:
    """Set the number of virtual workers, which the processes that train together compute for.

    A solver that is created from now on has a train net for each virtual worker of its process.
    Its weights depend on the number of virtual workers, not on the number of processes. The process
    computes with one thread, unless OMP_NUM_THREADS is set: bits may depend on it.

    Raises:
        UsageError: the count is out of range.
    """
    if not 1 <= count <= MAX_WORKERS:
        raise UsageError(f"{count} virtual workers: expected 1 to {MAX_WORKERS}")
    MODE.virtual_workers = count
    compute_as_everywhere(LOGGER.info)


def set_multiprocess(multiprocess: bool) -> None:
    """Do nothing: the solvers are processes, not threads."""


def has_nccl() -> bool:
    """Return False: `NCCL` is not available; see `Gloo`."""
    return False


def layer_type_list() -> list[str]:
    """Return all registered layer types."""
    return sorted(known_types())


def init_log(level: int = 0, stderr: bool = True) -> None:
    """Write log records of at least this severity (0 INFO to 3 FATAL) to standard error, in
    glog's format.

    Raises:
        UsageError: there is no such severity.
    """
    if not 0 <= level < len(LEVELS):
        raise UsageError(f"log level {level}: expected 0 (INFO) to 3 (FATAL)")
    while _LOG:
        _LOG.pop().close()
    _LOG.append(glog.setup(stream=sys.stderr if stderr else None, level=LEVELS[level]))


def log(text: str) -> None:
    """Write a line to the log."""
    LOGGER.info(text)


def next_seed(given: int | None = None) -> int:
    """Return the seed of the next net, which a definition may give."""
    if given is not None:
        return given
    seed = secrets.randbits(31) if MODE.seed is None else derive_seed(MODE.seed, "net", MODE.nets)
    MODE.nets += 1
    return seed


def next_context(phase: int) -> LayerContext:
    """Return the context of the next net, with a seed of its own."""
    return context_of(phase, next_seed(), rank=_checked_rank(), workers=solver_count())


def context_of(phase: int, seed: int, *, rank: int, workers: int) -> LayerContext:
    """Return the context of a net that reads the records of one of `workers`."""
    return LayerContext(
        phase=phase,
        seed=seed,
        rank=rank,
        workers=workers,
        seat=Seat(local_rank=rank, local_workers=workers, rank=rank),
        device=MODE.device,
    )


def placed_virtual_workers() -> tuple[VirtualWorkers, int]:
    """Return the virtual workers by process, and the rank of this process.

    Raises:
        UsageError: there are fewer virtual workers than processes, or the rank is out of range, or
            the job has other numbers.
    """
    rank, processes, count = _checked_rank(), solver_count(), MODE.virtual_workers
    of_job = current_context().member.virtual_workers
    if of_job is not None:
        if (processes, count or of_job.count) != (of_job.processes, of_job.count):
            raise UsageError(
                f"the script has {counted(processes, 'solver')} and "
                f"{counted(count or of_job.count, 'virtual worker')}, and its job has "
                f"{of_job.processes} and {of_job.count}; do not set them in a script of `poseidon "
                "run`"
            )
        return of_job, rank
    if count is None:
        return VirtualWorkers.one_each(processes), rank
    if count < processes:
        raise UsageError(
            f"{counted(count, 'virtual worker')} for {processes} solvers: expected one or more for "
            "each process; see set_virtual_workers and set_solver_count"
        )
    return VirtualWorkers.spread(count, [1.0] * processes), rank


@contextmanager
def acting_as(rank: int, count: int) -> Iterator[None]:
    """Let `solver_rank` and `solver_count` return these numbers inside the block."""
    before = MODE.rank, MODE.count
    MODE.rank, MODE.count = rank, count
    try:
        yield
    finally:
        MODE.rank, MODE.count = before


def seeds_virtual_workers() -> bool:
    """Return whether the user has set virtual workers, here or for the job."""
    return (MODE.virtual_workers or current_context().member.virtual_workers) is not None


class ProcessSeeds:
    """Seeds the generators of the process as `poseidon train` does, if the user has set virtual
    workers and has layers that may draw from them.

    Args:
        job: the seed of the job.
        train: the train net.
    """

    def __init__(self, job: int, train: NetDefinition) -> None:
        self.job = job
        self._draws = seeds_virtual_workers() and draws_from_process(train)

    def put(self, *path: int | str) -> None:
        """Seed them for what has this path."""
        if self._draws:
            seed_generators(derive_seed(self.job, *path), MODE.device)


def _checked_rank() -> int:
    rank, count = solver_rank(), solver_count()
    if rank >= count:
        raise UsageError(f"solver rank {rank} of {count}: expected a rank below the count")
    return rank


def _check_gpu(gpu: int) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= gpu < count:
        raise UsageError(
            f"there is no GPU {gpu}: {count} CUDA devices were found; use set_mode_cpu()"
        )
