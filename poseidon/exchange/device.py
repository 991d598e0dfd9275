"""What the exchange needs of a device: streams, events, host memory that it copies to and from.

A device may run work later than the host hands it over. Work on one stream runs in order. Two
streams run at the same time, save where one waits for an event of the other.

Laws:

* Each thread has a current stream, on which its work runs. `on` changes it.
* The training loop never waits for the device: a stream waits for an event (`wait`). Only background
  threads call `Event.synchronize`.
* From the moment at which a copy to or from host memory is begun until its event the host leaves
  that memory alone.
* Memory of a tensor that was made on one stream and is used on another is freed only after the host
  has waited for that use, or after `keep`.
* Between processes no event orders anything. A process that has worked on memory that is lent waits
  for that work on the host, and tells the others by a message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgpack
import torch
import torch.utils.deterministic
from torch import Tensor

from poseidon.errors import UsageError
from poseidon.exchange.compute_options import DEFAULT_COMPUTE, Arithmetic, ComputeOptions


class Event(Protocol):
    """A point on a stream: all work before it."""

    def synchronize(self) -> None:
        """Wait on the host until that work is done."""

    def query(self) -> bool:
        """Return whether it is done."""


class _Done:
    """The event after no work."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


DONE: Event = _Done()


class Device:
    """A device, as one worker sees it. This is the host itself, which runs all work at once: there is
    nothing to wait for. Other devices override every method.

    Attributes:
        is_host: whether it is the host.
    """

    is_host = True

    def stream(self) -> Any:
        """Return a new stream, for `on`."""
        return None

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Let the body's work run on a stream."""
        return nullcontext()

    def event(self) -> Event:
        """Return the event after the work that is on the current stream so far."""
        return DONE

    def wait(self, event: Event) -> None:
        """Let later work on the current stream run after an event; return at once."""

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor of a different stream, when it is freed, until the work that
        is on the current stream by then is done.
        """

    def host_memory(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory on the host to and from which `copy_(..., non_blocking=True)` returns at
        once: pinned, for a GPU.
        """
        return torch.empty(shape, dtype=dtype, device="cpu")

    def pin(self, memory: Tensor) -> bool:
        """Let memory on the host be as that of `host_memory`, until `unpin`. Return False where the
        driver refuses: copies then wait.
        """
        return True

    def unpin(self, memory: Tensor) -> None:
        """Undo `pin`. No copy is under way."""

    def lend(self, memory: Tensor) -> bytes:
        """Return a handle, by which one other process of this host can `borrow` a tensor of this
        device, of float32 and with memory of its own. The memory stays until both have let go of
        it. Empty: this is the host.

        Raises:
            RuntimeError: memory of this device cannot be lent.
        """
        return b""

    def borrow(self, handle: bytes) -> Tensor:
        """Return the memory that another process has lent, as flat float32 that work on this device
        can use. The host waits for that work before it lets go of the tensor.

        Raises:
            RuntimeError: this device cannot reach it, or the handle is empty.
        """
        raise RuntimeError("the processes of a host share memory by files")

    def synchronize(self) -> None:
        """Wait on the host until all work on all streams is done."""

    def copy(self, source: Tensor, to: Tensor, stream: Any, after: Event) -> Event:
        """Begin to copy between a tensor and host memory on a stream, after an event; return the
        event after the copy. The caller keeps both until then.
        """
        with self.on(stream):
            self.wait(after)
            to.copy_(source, non_blocking=True)
            return self.event()


class Streams(NamedTuple):
    """A device, with streams for work beside the current one: copies out of it, and into it."""

    device: Device
    out: Any
    into: Any

    @classmethod
    def of(cls, device: Device) -> Streams:
        """Return new streams."""
        return cls(device, device.stream(), device.stream())


class CudaDevice(Device):
    """A GPU, through torch."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    @contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        # the current GPU of a new thread is number 0, and torch would make a context there
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

    def event(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # a thread that waits leaves its core to others
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Event) -> None:
        if isinstance(event, torch.cuda.Event):
            torch.cuda.current_stream(self._device).wait_event(event)

    def keep(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))

    def host_memory(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        # torch pins for the current GPU, which in a thread is number 0
        with torch.cuda.device(self._device):
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def pin(self, memory: Tensor) -> bool:
        if not memory.numel():
            return True
        # as a number: torch's object for success is true, too
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
            with suppress(RuntimeError):  # the next kernel reports the error once more
                torch.ones(1, device=self._device)
            return False
        return True

    def unpin(self, memory: Tensor) -> None:
        if memory.numel():
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))

    def lend(self, memory: Tensor) -> bytes:
        # without the event that torch sends along: the host waits
        _, handle, size, offset, counter, place, *_ = memory.untyped_storage()._share_cuda_()
        packed: bytes = msgpack.packb([handle, size, offset, counter, place])
        return packed

    def borrow(self, handle: bytes) -> Tensor:
        if not handle:
            raise RuntimeError("it is not lent")
        memory = torch.empty(0, dtype=torch.float32, device=self._device)
        parts = msgpack.unpackb(handle)
        try:
            # as memory of this GPU: with the number of the other one torch would make a context
            # there, and it need not be visible here
            storage = torch.UntypedStorage._new_shared_cuda(memory.get_device(), *parts, b"", False)
        except RuntimeError:
            torch.UntypedStorage._release_ipc_counter_cuda(*parts[3:])  # the lender waits for it
            raise
        return memory.set_(storage)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


GIB = 1 << 30
TYPES = {Arithmetic.BFLOAT16: torch.bfloat16, Arithmetic.FLOAT16: torch.float16}
"""The type of autocast of each precision that has one."""


def compute_on(device: torch.device, options: ComputeOptions = DEFAULT_COMPUTE) -> None:
    """Let this process compute on a device, in the main thread: a GPU becomes torch's current one, so
    `.cuda()` means it.

    float32 is computed as float32, unless TF32 is asked for. torch would use TF32 in convolutions.

    Raises:
        UsageError: TF32 on a device that does not have it.
    """
    uses_tf32 = options.precision is Arithmetic.TF32
    if uses_tf32 and device.type != "cuda":
        raise UsageError(
            "--precision=tf32 is for GPUs, but this worker computes on the CPU; use --gpu=IDS, or "
            "--precision=float32 or bfloat16"
        )
    if options.deterministic:
        # cuBLAS reads it when a process first multiplies matrices
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = uses_tf32
        torch.backends.cuda.matmul.allow_tf32 = uses_tf32
        torch.backends.cudnn.deterministic = options.deterministic


def used_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes in use, of a GPU by all processes, of the host by this one, and all bytes."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free, total
    resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    page = os.sysconf("SC_PAGE_SIZE")
    return int(resident) * page, os.sysconf("SC_PHYS_PAGES") * page


def memory_in_use(device: torch.device) -> str:
    """Return how much memory is in use, as text."""
    used, total = used_memory(device)
    where = "of the GPU" if device.type == "cuda" else "of this machine, by this process,"
    return f"{used / GIB:.1f} of {total / GIB:.1f} GiB {where}"


def choose_fastest(options: ComputeOptions, *, shapes_change: bool) -> None:
    """Let cuDNN choose its algorithms by time: of a net whose shapes stay, unless its bits are to be
    the same each time. It has no effect without a GPU.
    """
    torch.backends.cudnn.benchmark = not (options.deterministic or shapes_change)


HOST = Device()
KINDS: dict[str, Callable[[torch.device], Device]] = {"cuda": CudaDevice}
"""How to make the device of a type of torch; work on all others runs at once, as on the host."""


def device_of(device: torch.device) -> Device:
    """Return the device of tensors that are there."""
    make = KINDS.get(device.type)
    return HOST if make is None else make(device)
