"""How a process computes: with how many threads, and without denormal numbers, whichever of its
threads computes.

A library's sums, and so its bits, follow its number of threads. That number is a property of each
thread, not of the process: `torch.set_num_threads` sets it for the calling thread, and for another
thread only once that one calls a torch function which runs in parallel by itself. A matrix product
does not: MKL computes the first ones of a new thread with as many threads as the machine has cores.

Denormal numbers (float32: below 1.2e-38) are zero in results and in operands. Where they are not,
many processors take up to a hundred times as long for an operation on one, and a net whose
gradients underflow is slower there. The mode is a property of each thread, too. A thread has it
from the one that starts it, also the threads of OpenMP, of autograd, and those that make batches
ahead; one that is there already does not get it.

Law: every process of a job is started with `process_environment.environment`, and every thread that
computes calls `prepare_thread` first: a shard has the environment of the workers of its host, and
computes with one thread; other processes are started by other programs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ps_server.process_environment import ALL_ALIGNMENTS

_WITH_FLAGS, _STRICT = -1, 0x10000  # MKL_CBWR_ALL and MKL_CBWR_STRICT of mkl_types.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """What the bits of a process's results depend on, beside its inputs.

    Attributes:
        threads: of each library's sums.
        processor: `processor_name` of the device that computes.
        torch_version: with the build, as in 2.13.0+cpu.
        arithmetic: type and kernels, as in `bfloat16, channels last, deterministic kernels`.
    """

    threads: int
    processor: str
    torch_version: str
    arithmetic: str = "float32"

    @classmethod
    def here(
        cls,
        device: torch.device,
        *,
        autocast: torch.dtype | None = None,
        channels_last: bool = False,
    ) -> Computation:
        """Return the computation of the calling process on this device.

        Args:
            autocast: the type of 16 bits that it computes in; None: what torch is set to.
            channels_last: whether images lie in memory with channels last.
        """
        words = [_type_of(device) if autocast is None else str(autocast).removeprefix("torch.")]
        if channels_last:
            words.append("channels last")
        if torch.are_deterministic_algorithms_enabled():
            words.append("deterministic kernels")
        elif device.type == "cuda" and torch.backends.cudnn.benchmark:
            words.append("kernels chosen by time")
        return cls(
            threads=torch.get_num_threads(),
            processor=processor_name(device),
            torch_version=str(torch.__version__),
            arithmetic=", ".join(words),
        )

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{threads} on {self.processor} with torch {self.torch_version}, {self.arithmetic}"


def _type_of(device: torch.device) -> str:
    """Return in what torch computes products of float32."""
    if device.type != "cuda":
        return "float32"
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(cudnn, "conv"):  # torch 2.9; older flags cannot be read once a script sets these
        uses_tf32 = "tf32" in (matmul.fp32_precision, cudnn.conv.fp32_precision)
    else:
        uses_tf32 = matmul.allow_tf32 or cudnn.allow_tf32
    return "tf32" if uses_tf32 else "float32"


def prepare_process(threads: int | None = None) -> None:
    """Flush denormal numbers, and compute with this many threads: call it first in the main
    thread of a process.

    Args:
        threads: of torch's operations; None leaves their number as it is.
    """
    # does nothing where the processor cannot: x86 with SSE3 and ARM64 can
    torch.set_flush_denormal(True)
    if threads is not None:
        torch.set_num_threads(threads)


def let_forks_compute() -> None:
    """Let processes that this one forks compute with one thread; torch would wait for its threads,
    which only this process has.
    """
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def take_code_for_all_alignments() -> bool:
    """Let MKL take the code that it takes in a process with `process_environment.environment`,
    unless the user has chosen. Call it before the first product of matrices.

    Returns:
        False if MKL has taken other code already.
    """
    if all(map(os.environ.get, ALL_ALIGNMENTS)):
        return True
    os.environ.update(ALL_ALIGNMENTS)
    taken = getattr(ctypes.CDLL(torch._C.__file__), "mkl_serv_cbwr_get", None)
    return taken is None or taken(_WITH_FLAGS) & _STRICT != 0


def prepare_thread() -> None:
    """Compute with the process's number of threads from now on in the calling thread; some 100
    ns.
    """
    torch.get_num_threads()  # makes torch set the numbers of OpenMP and MKL for this thread


def processor_name(device: torch.device) -> str:
    """Return what bits depend on: the model of a device; of a CPU with the vector instructions that
    torch uses, as in `AMD EPYC, AVX512`; of a GPU with the versions of its libraries, as in `NVIDIA
    H100, CUDA 12.8, cuDNN 91002, NCCL 2.27.3`.
    """
    if device.type == "cuda":
        return ", ".join([torch.cuda.get_device_name(device), *_libraries_of_gpus()])
    model = "unknown processor"
    try:
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass  # no /proc: only a message is less exact
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"


def _libraries_of_gpus() -> list[str]:
    """Return the versions of CUDA, cuDNN and NCCL that torch has."""
    nccl = ""
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):  # a torch without NCCL
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    found = {
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "NCCL": nccl,
    }
    return [f"{name} {version}" for name, version in found.items() if version]
