"""Work beside the compute stream of a GPU.

On a CPU there are no streams, and all of this does nothing.

Law: the compute stream is never synchronised with the host. The side stream waits for events of the
compute stream, and the compute stream for events of the side stream. Only background threads wait
for either.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ps_server import LocalProtocolError
from ps_server.monitor import Monitor
from ps_server.network import TIMEOUT_S
from ps_server.numerics import prepare_thread

LOGGER = logging.getLogger(__name__)
Event = torch.cuda.Event | None


class SideStream:
    """A stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def record_event(self) -> Event:
        """Return an event after the work that has been queued on the current stream."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextlib.contextmanager
    def after(self, event: Event) -> Iterator[None]:
        """Run the body's work on the side stream, after `event`."""
        if self._stream is None:
            yield
            return
        if event is not None:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield

    def wait_event(self, event: Event) -> None:
        """Make the current stream wait for `event`; the host does not wait."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def synchronize(self) -> None:
        """Wait on the host until the side stream has finished its work. For background threads."""
        if self._stream is not None:
            self._stream.synchronize()

    def host_buffer(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory on the host that copies to and from this device use directly (pinned, for a
        GPU).
        """
        return torch.empty(*shape, dtype=dtype, device="cpu", pin_memory=self._stream is not None)


class SerialExecutor:
    """Runs calls one after the other: on a CPU at once; for a GPU, whose copies take time, on a
    thread of its own.

    Args:
        threaded: whether a CPU has a thread, too.
        failed: called with what a call on the thread raised; later calls are dropped.
        timeout_s: longest time that `drain` and `close` wait for the calls.
    """

    def __init__(
        self,
        device: torch.device,
        name: str,
        failed: Callable[[Exception], None],
        *,
        threaded: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._failed = failed
        self._closed = False
        self._monitor = Monitor(
            timeout_s, closed="the exchange is closed", hangs=": the device hangs"
        )
        self._queued = self._ended = 0
        self._thread: threading.Thread | None = None
        self.threaded = threaded or device.type == "cuda"
        """Whether calls run on a thread of their own."""
        if self.threaded:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def call(self, function: Callable[[], None]) -> int:
        """Run `function` after all earlier calls; where there is a thread this returns at once.

        Returns:
            The number of the call, for `drain`.

        Raises:
            LocalProtocolError: there is a thread, and this is closed.
        """
        if self._thread is None:
            function()
            return 0
        with self._monitor:
            if self._closed:
                raise LocalProtocolError("the exchange is closed")
            self._queued += 1
            self._calls.put(function)
            return self._queued

    def drain(self, call: int | None = None) -> None:
        """Wait until all calls have run, or those up to one of a number.

        Raises:
            StalenessTimeout: they have not within `timeout_s`.
        """
        if self._thread is None:
            return
        last = self._queued if call is None else call
        self._monitor.wait_for(
            lambda: True if self._ended >= last else None,
            f"the calls of '{self._thread.name}' did not end",
        )

    def close(self) -> None:
        """Run the calls that are left, and stop. Safe to call twice."""
        if self._thread is None:
            return
        with self._monitor:
            if not self._closed:
                self._closed = True
                self._calls.put(None)
        join_within(self._thread, self._monitor.timeout_s)

    def _run(self) -> None:
        prepare_thread()
        broken = False
        while (function := self._calls.get()) is not None:
            try:
                if not broken:
                    function()
            except Exception as error:  # noqa: BLE001 - the thread's outermost frame: its owner raises the error
                broken = True
                self._failed(error)
            finally:
                with self._monitor:
                    self._ended += 1
                    self._monitor.notify()


def join_within(thread: threading.Thread, limit_s: float) -> None:
    """Wait for the end of a daemon thread that only its device can hold up.

    Log a warning where it does.
    """
    thread.join(limit_s)
    if thread.is_alive():
        LOGGER.warning(
            "the thread %s has not ended within %g s: the device hangs", thread.name, limit_s
        )
