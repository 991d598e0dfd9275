"""Requests to a running job, queued for its launcher's loop: signals, and to regroup.

Law: a handler only appends to a queue, which is safe at any moment. The previous handlers are
restored at the end.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

from poseidon.cluster.supervision.state import (
    RegroupRequested,
    SignalEffect,
    SignalReceived,
    SupervisionSettings,
)


def exit_code_of(number: signal.Signals) -> int:
    """Return the exit code of a command that ends because of a signal, as in
    shells: 130 after SIGINT, 143 after SIGTERM.
    """
    return 128 + number


@contextmanager
def handled(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle signals while the block runs; then their handlers from before do again."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class SignalRequests:
    """Handles SIGINT, SIGHUP and SIGTERM while it is entered.

    SIGINT and SIGHUP have the effects of the settings; SIGTERM is a request to stop within a
    deadline, since its sender will soon send SIGKILL. Only the main thread can handle signals:
    entered within an active one, this stays empty.
    """

    def __init__(self, settings: SupervisionSettings) -> None:
        effects = {
            signal.SIGINT: (settings.sigint_effect, None),
            signal.SIGHUP: (settings.sighup_effect, None),
            signal.SIGTERM: (SignalEffect.STOP, settings.term_deadline_s),
        }
        self._requests = {
            number: SignalReceived(effect=what, within_s=limit_s, exit_code=exit_code_of(number))
            for number, (what, limit_s) in effects.items()
        }
        self._received: deque[SignalReceived | RegroupRequested] = deque(maxlen=16)
        self.stop_code = 0
        """The exit code of a job that ends for the request that `stop_wanted` has found."""
        self.asked_to_stop = False
        """Whether a request to stop has ever come."""
        self._handled = ExitStack()

    def __enter__(self) -> SignalRequests:
        if threading.current_thread() is threading.main_thread():
            self._handled.enter_context(handled(self._requests, self._receive))
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.close()

    def regroup(self) -> None:
        """Ask the job to regroup. Any thread may call it."""
        self._received.append(RegroupRequested())

    def repeat(self, request: SignalReceived) -> None:
        """Have a request taken once more, before all others."""
        self._received.appendleft(request)

    def forget_regroup(self) -> None:
        """Drop requests to regroup: the job is about to do it."""
        with suppress(ValueError):
            while True:
                self._received.remove(RegroupRequested())

    def take(self) -> list[SignalReceived | RegroupRequested]:
        """Return the requests since the last call, in order."""
        taken = []
        while self._received:
            taken.append(self._received.popleft())
        return taken

    def stop_wanted(self) -> bool:
        """Return whether a request to stop has come since the last call; drop requests of other
        kinds.
        """
        codes = [
            request.exit_code
            for request in self.take()
            if isinstance(request, SignalReceived) and request.effect is SignalEffect.STOP
        ]
        self.stop_code = codes[0] if codes else self.stop_code
        return bool(codes)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        request = self._requests[signal.Signals(number)]
        self._received.append(request)
        self.asked_to_stop |= request.effect is SignalEffect.STOP
