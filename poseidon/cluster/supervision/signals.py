"""Signals to the launcher, turned into requests that its loop picks up.

Law: a handler does nothing but append to a queue, the one thing that is safe at any moment. The handlers
that were there before come back at the end.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from types import FrameType, TracebackType

from poseidon.cluster.supervision.settings import SignalEffect, SupervisionSettings
from poseidon.cluster.supervision.steps import Requested


def exit_code_of(number: signal.Signals) -> int:
    """What a command exits with that ends because of a signal, as shells have it: 130 after SIGINT, 143 after SIGTERM."""
    return 128 + number


class SignalRequests:
    """Catches SIGINT, SIGHUP and SIGTERM while it is entered.

    SIGINT and SIGHUP do what the settings say; SIGTERM is a request to stop within a
    deadline: whoever sends it will soon do worse. Only the main thread can
    catch signals: entered in another one, this stays empty.
    """

    def __init__(self, settings: SupervisionSettings) -> None:
        self._requests = {
            signal.SIGINT: Requested(effect=settings.sigint_effect, exit_code=exit_code_of(signal.SIGINT)),
            signal.SIGHUP: Requested(effect=settings.sighup_effect, exit_code=exit_code_of(signal.SIGHUP)),
            signal.SIGTERM: Requested(
                effect=SignalEffect.STOP,
                within_s=settings.term_deadline_s,
                exit_code=exit_code_of(signal.SIGTERM),
            ),
        }
        self._received: deque[Requested] = deque(maxlen=16)
        self.stop_code = 0
        """What a job exits with that ends for the request that `stop_wanted` has found."""
        self._before: dict[signal.Signals, signal.Handlers | None] = {}

    def __enter__(self) -> SignalRequests:
        if threading.current_thread() is threading.main_thread():
            for number in self._requests:
                self._before[number] = signal.signal(number, self._receive)  # type: ignore[assignment]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take(self) -> list[Requested]:
        """The requests since the last call, in order."""
        taken = []
        while self._received:
            taken.append(self._received.popleft())
        return taken

    def stop_wanted(self) -> bool:
        """Whether a request to stop has come since the last call; requests of other kinds are dropped with it."""
        codes = [request.exit_code for request in self.take() if request.effect is SignalEffect.STOP]
        self.stop_code = codes[0] if codes else self.stop_code
        return bool(codes)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(self._requests[signal.Signals(number)])
