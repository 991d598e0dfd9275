"""Calls of torch.distributed that run in the background, and the copies between a device and the
host's memory that they wait for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor
from torch.utils._pytree import tree_leaves

from poseidon.exchange.device import HOST, Device, Event, device_of
from poseidon.torch.process_group.collectives import SMALL_BYTES
from ps_server import StalenessTimeout

dist: Any = torch.distributed  # its stubs lack half of what is used here


class Calls:
    """The calls of a script that need all workers, in the order of the script.

    All workers make them in the same order, and after equally many steps. Other threads than the
    script's own have no such order, so their calls do not count.

    Args:
        report: called with the number of calls that have begun, and the name of the one that is
            waited for, or an empty text.
    """

    def __init__(self, report: Callable[..., int] = lambda *_: 0) -> None:
        self._report = report
        self._begun = 0

    def begin(self, name: str) -> NamedCall:
        """Count a call, which the script of one worker may wait for, and another's not."""
        if not _is_main_thread():
            return NamedCall(name, self)
        self._begun += 1
        return NamedCall(name, self, self._report(self._begun, ""))

    @contextmanager
    def waiting(self, name: str, number: int | None) -> Iterator[None]:
        """Report that the script waits inside the block; see `NamedCall`."""
        reports = _is_main_thread()
        if reports:
            self._report(self._begun, name, number)
        yield
        if reports:
            self._report(self._begun, "")


class NamedCall(NamedTuple):
    """A call of the script that needs all workers.

    Attributes:
        number: among those that the report of `script` counts; None: of another thread.
    """

    name: str
    script: Calls
    number: int | None = None

    def waiting(self) -> AbstractContextManager[None]:
        """Report that the script waits inside the block for the call."""
        return self.script.waiting(self.name, self.number)


class Copy(NamedTuple):
    """Results that are on their way to a device, or are computed there.

    Attributes:
        event: after which they are there.
        flats: what they are made of, which is kept until then.
    """

    device: Device
    event: Event
    flats: Sequence[Tensor]


class PoseidonWork(dist.Work):  # type: ignore[misc]
    """A call that runs in the background.

    Args:
        run: does it, and notes the copies that it has begun; its error is raised in `wait`. A
            receive returns the sender's rank.
        result: what `result` and the future have.
        fail: is given the error of `run`, before anything waits for the call any more.
        call: of the script; None: it is with one worker only.
    """

    def __init__(
        self,
        run: Callable[[list[Copy]], int | None],
        result: Any,
        fail: Callable[[Exception], None],
        call: NamedCall | None = None,
    ) -> None:
        super().__init__()
        self._run = run
        self._fail = fail
        self._sender: int | None = None
        self._result = result
        self._call = call
        self._error: BaseException | None = None
        self._copies: list[Copy] = []
        self._begun = threading.Event()
        """Only copies are left to do."""
        self._done = threading.Event()
        self._has_callbacks = self._is_waited_for = False
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def run(self) -> None:
        """Do it. Raises nothing."""
        try:
            with torch.inference_mode():  # only there tensors that were made there may be changed
                self._sender = self._run(self._copies)
            self._begun.set()
            for copy in self._copies:
                copy.event.synchronize()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._error = error
            if isinstance(error, Exception):
                self._fail(error)
        self._begun.set()
        self._done.set()
        if isinstance(self._error, Exception):
            self._future.set_exception(self._error)
        else:
            self._future.set_result(self._result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done, but for copies for which the current stream waits.

        Args:
            timeout: the longest wait; None or 0: the group's.

        Raises:
            StalenessTimeout: it is not done in time. It continues.
        """
        limit_s = timeout.total_seconds() if timeout else threading.TIMEOUT_MAX
        with nullcontext() if self._call is None else self._call.waiting():
            has_begun = self._begun.wait(min(limit_s, threading.TIMEOUT_MAX))
        if not has_begun:
            what = "a message" if self._call is None else self._call.name
            raise StalenessTimeout(f"{what} was not done within {limit_s:g} s")
        if self._error is not None:
            raise self._error
        for copy in self._copies:
            copy.device.wait(copy.event)
        self._is_waited_for = True
        if self._has_callbacks or not self._copies:
            self._future.wait()  # a callback may wait for the call before
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        return self._result

    def _source_rank(self) -> int:
        assert self._sender is not None
        return self._sender

    def get_future(self) -> Any:
        self._has_callbacks = True
        if self._is_waited_for:  # torch reads its value then
            self._future.wait()
        return self._future


def ended(result: Any) -> PoseidonWork:
    """Return a call that has ended."""
    work = PoseidonWork(lambda _: None, result, lambda _: None)
    work.run()
    return work


class WorkThread:
    """Runs calls one after another, in a thread of its own that begins with the first one."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[PoseidonWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending: threading.Thread | None = None

    def add(self, work: PoseidonWork) -> None:
        """Run a call after those that were added before. One that the thread itself adds, it runs
        now: a callback of the call that has just ended, which may wait for this one.
        """
        if threading.current_thread() is self._thread:
            work.run()
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve,
                args=(self._calls, self._ending),
                name="poseidon-collectives",
                daemon=True,
            )
            self._thread.start()
        self._calls.put(work)

    def end(self) -> None:
        """End the thread, after the calls that were added. A later call starts a new thread."""
        self._calls.put(None)
        self._calls, self._ending, self._thread = queue.SimpleQueue(), self._thread, None

    def _serve(
        self, calls: queue.SimpleQueue[PoseidonWork | None], before: threading.Thread | None
    ) -> None:
        if before is not None:
            before.join()
        while (work := calls.get()) is not None:
            work.run()


class Staging:
    """Where the tensors of a group are while they travel.

    Args:
        lends: returns whether large tensors of a GPU may stay there.
    """

    def __init__(self, lends: Callable[[], bool]) -> None:
        self._lends = lends
        self._streams: dict[torch.device, Any] = {}

    def stream_of(self, tensors: Any) -> Any:
        """Return the stream of this group on the device of tensors."""
        first = first_of(tensors)
        if first is None:
            return None
        if first.device not in self._streams:
            self._streams[first.device] = device_of(first.device).stream()
        return self._streams[first.device]

    def room(self, tensor: Tensor) -> Tensor:
        """Return memory for what is received for a tensor."""
        where = tensor.device if self._stays(tensor) else "cpu"
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device=where)

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the tensor's elements, in order, in the memory that they are sent from.

        It is a view of the tensor if the tensor lies there. The elements of a GPU's tensor are in
        the host's memory once the work so far on the GPU's stream has ended.
        """
        device, own = device_of(tensor.device), tensor.detach().contiguous().reshape(-1)
        if self._stays(tensor):
            return own
        device.keep(tensor)
        return device.host_memory(own.numel(), dtype=own.dtype).copy_(own, non_blocking=True)

    def _stays(self, tensor: Tensor) -> bool:
        """Return whether a tensor is sent, or received, where it is."""
        is_on_host = device_of(tensor.device).is_host
        return is_on_host or (tensor.nbytes > SMALL_BYTES and self._lends())


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def first_of(tensors: Any) -> Tensor | None:
    """Return the first of tensors in lists of any depth."""
    return next((one for one in tree_leaves(tensors) if isinstance(one, Tensor)), None)


def device_of_all(tensors: Any) -> Device:
    first = first_of(tensors)
    return HOST if first is None else device_of(first.device)


def fill(tensors: Sequence[Tensor], flats: Sequence[Tensor]) -> list[Copy]:
    """Begin to copy results to tensors that nothing uses meanwhile; return the copies."""
    with torch.no_grad():
        for tensor, flat in zip(tensors, flats, strict=True):
            tensor.copy_(flat.view(tensor.shape), non_blocking=True)
    return copies_of(tensors, flats)


def copies_of(tensors: Sequence[Tensor], flats: Sequence[Tensor]) -> list[Copy]:
    device = device_of_all(tensors)
    return [Copy(device, device.event(), flats)]
