"""What Caffe keeps once a process: where to compute, the random seed, and which of several processes this is.

Law: the only state of this room that is not in an object, because `caffe.set_mode_gpu()` and its kin have no object to
belong to. A net takes it over when it is made; later calls do not move a net that exists.
"""

from __future__ import annotations

import logging
import secrets
import sys
from dataclasses import dataclass

import torch

from poseidon import log as glog
from poseidon.errors import UsageError
from poseidon.layers.base import CPU, LayerContext
from poseidon.layers.registry import known_types
from poseidon.net.random_state import derive_seed

LOGGER = logging.getLogger("poseidon.pycaffe")
# glog's severities 0 to 3.
LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


@dataclass(slots=True)
class Mode:
    """The process's settings.

    Attributes:
        device: where the next net computes.
        gpu: number of the GPU that `set_mode_gpu` takes.
        seed: what the next nets' seeds come from; None: anything.
        nets: nets made since the seed was set.
        rank: this process among `count` that train together.
        count: how many processes train together.
        multiprocess: the others are processes, not threads; always so here.
    """

    device: torch.device = CPU
    gpu: int = 0
    seed: int | None = None
    nets: int = 0
    rank: int = 0
    count: int = 1
    multiprocess: bool = False


MODE = Mode()
_LOG: list[glog.LogOutputs] = []


def set_mode_cpu() -> None:
    """Compute on the CPU."""
    MODE.device = CPU


def set_mode_gpu() -> None:
    """Compute on the GPU that `set_device` named, at first number 0.

    Raises:
        UsageError: there is no such CUDA device.
    """
    _check_gpu(MODE.gpu)
    MODE.device = torch.device("cuda", MODE.gpu)


def set_device(gpu: int) -> None:
    """Name the GPU of `set_mode_gpu`.

    Raises:
        UsageError: there is no such CUDA device.
    """
    _check_gpu(gpu)
    MODE.gpu = gpu
    if MODE.device.type == "cuda":
        MODE.device = torch.device("cuda", gpu)


def set_random_seed(seed: int) -> None:
    """Make the nets made from now on draw alike in every run."""
    MODE.seed = int(seed)
    MODE.nets = 0


def solver_count() -> int:
    """How many processes train together."""
    return MODE.count


def set_solver_count(count: int) -> None:
    """Say how many processes train together: data layers made from now on deal their records among them.

    Raises:
        UsageError: the count is below 1.
    """
    if count < 1:
        raise UsageError(f"solver count {count}: expected 1 or more")
    MODE.count = count


def solver_rank() -> int:
    """Which of them this process is, from 0."""
    return MODE.rank


def set_solver_rank(rank: int) -> None:
    """Say which of them this process is.

    Raises:
        UsageError: the rank is negative.
    """
    if rank < 0:
        raise UsageError(f"solver rank {rank}: expected 0 or more")
    MODE.rank = rank


def set_multiprocess(multiprocess: bool) -> None:
    """Say that the solvers are processes. They always are here, so nothing changes."""
    MODE.multiprocess = bool(multiprocess)


def has_nccl() -> bool:
    """Return whether `NCCL` can be used: never, see `Gloo`."""
    return False


def layer_type_list() -> list[str]:
    """Return every layer type that a net may use."""
    return sorted(known_types())


def init_log(level: int = 0, stderr: bool = True) -> None:
    """Write the log in glog's form to standard error, from this severity (0 INFO to 3 FATAL) on.

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


def next_context(phase: int, seed: int | None = None) -> LayerContext:
    """Where the next net lives, with a seed of its own unless one is given."""
    if seed is None:
        seed = secrets.randbits(31) if MODE.seed is None else derive_seed(MODE.seed, "net", MODE.nets)
        MODE.nets += 1
    return LayerContext(
        phase=phase,
        seed=seed,
        rank=_checked_rank(),
        workers=MODE.count,
        local_rank=MODE.rank,
        local_workers=MODE.count,
        device=MODE.device,
    )


def _checked_rank() -> int:
    if MODE.rank >= MODE.count:
        raise UsageError(f"solver rank {MODE.rank} of {MODE.count}: expected one below the count")
    return MODE.rank


def _check_gpu(gpu: int) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= gpu < count:
        raise UsageError(f"there is no GPU {gpu}: {count} CUDA devices were found; use set_mode_cpu()")
