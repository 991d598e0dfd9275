"""Work beside the compute stream of a GPU. On a CPU there are no streams, and all of this does nothing.

Law: the compute stream is never synchronised with the host. The side stream waits for events of the compute stream, and
the compute stream for events of the side stream. Only background threads wait for either.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ps_server import LocalProtocolError

Event = torch.cuda.Event | None


class SideStream:
    """A stream beside the one that computes.

    Args:
        device: of the tensors.
    """

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

    def host_buffer(self, *shape: int) -> Tensor:
        """Return float32 memory on the host that copies to and from this device use directly (pinned, for a GPU)."""
        return torch.empty(*shape, dtype=torch.float32, device="cpu", pin_memory=self._stream is not None)


class SerialExecutor:
    """Runs calls one after the other: on a CPU at once; for a GPU, whose copies take time, on a thread of its own.

    Args:
        device: of the tensors.
        name: of the thread.
        failed: called with what a call on the thread raised; later calls are dropped.
    """

    def __init__(self, device: torch.device, name: str, failed: Callable[[Exception], None]) -> None:
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._failed = failed
        self._closed = False
        self._closing = threading.Lock()
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` after all earlier calls; for a GPU this returns at once.

        Raises:
            LocalProtocolError: it is for a GPU, and this is closed.
        """
        if self._thread is None:
            function()
            return
        with self._closing:
            if self._closed:
                raise LocalProtocolError("the exchange is closed")
            self._calls.put(function)

    def drain(self) -> None:
        """Wait until all calls have run."""
        if self._thread is not None:
            self._calls.join()

    def close(self) -> None:
        """Run the calls that are left, and stop. Safe to call twice."""
        if self._thread is None:
            return
        with self._closing:
            if not self._closed:
                self._closed = True
                self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        broken = False
        running = True
        while running:
            function = self._calls.get()
            try:
                if function is None:
                    running = False
                elif not broken:
                    function()
            except Exception as error:  # noqa: BLE001 - the thread's outermost frame: its owner raises the error
                broken = True
                self._failed(error)
            finally:
                self._calls.task_done()
