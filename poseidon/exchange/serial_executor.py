"""Calls that wait for a device or for other workers, one after another on a thread of their own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import torch

from ps_server import LocalProtocolError
from ps_server.monitor import Monitor
from ps_server.network import TIMEOUT_S
from ps_server.numerics import prepare_thread

LOGGER = logging.getLogger(__name__)


class SerialExecutor:
    """Runs calls one after the other: at once, or on a thread of its own.

    Args:
        failed: called with what a call on the thread raised; later calls are dropped. None: `drain`
            raises it.
        threaded: whether there is a thread: calls wait for copies of a device, or take long.
        timeout_s: longest time that `drain` and `close` wait for the calls.
    """

    def __init__(
        self,
        name: str,
        failed: Callable[[Exception], None] | None = None,
        *,
        threaded: bool,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._failed = failed
        self._error: Exception | None = None
        self._closed = False
        self._monitor = Monitor(
            timeout_s, closed="the exchange is closed", hangs=": a device or another worker hangs"
        )
        self._queued = self._ended = 0
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_threaded(self) -> bool:
        """Whether calls run on a thread."""
        return self._thread is not None

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
            if self._thread.ident is None:
                self._thread.start()
            return self._queued

    def drain(self, call: int | None = None) -> None:
        """Wait until all calls have run, or those up to one of a number.

        Raises:
            StalenessTimeout: they have not within `timeout_s`.
            Exception: of the first call that failed, where nothing else is called with it.
        """
        if self._thread is None:
            return
        last = self._queued if call is None else call
        self._monitor.wait_for(
            lambda: True if self._ended >= last else None,
            f"the calls of '{self._thread.name}' did not end",
        )
        if self._error is not None and self._failed is None:
            raise self._error

    def close(self) -> None:
        """Run the calls that are left, and stop. Safe to call twice."""
        if self._thread is None:
            return
        with self._monitor:
            if not self._closed:
                self._closed = True
                self._calls.put(None)
        if self._thread.ident is not None:
            join_within(self._thread, self._monitor.timeout_s)

    def _run(self) -> None:
        prepare_thread()
        torch.set_grad_enabled(False)  # of this thread
        while (function := self._calls.get()) is not None:
            try:
                if self._error is None:
                    function()
            except Exception as error:  # noqa: BLE001 - the thread's outermost frame: its owner raises the error
                self._error = error
                if self._failed is not None:
                    self._failed(error)
            finally:
                with self._monitor:
                    self._ended += 1
                    self._monitor.notify()


def join_within(thread: threading.Thread, limit_s: float) -> None:
    """Wait for the end of a daemon thread that only a device or another worker can hold up.

    Log a warning where it does.
    """
    thread.join(limit_s)
    if thread.is_alive():
        LOGGER.warning(
            "the thread %s has not ended within %g s: a device or another worker hangs",
            thread.name,
            limit_s,
        )
