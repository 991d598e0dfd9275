"""A thread of the launcher that blocks, beside its main one.

It is a task of the launcher's process. The task hands a baton to a thread, and gets it back when
that waits, so only one of them runs at any time and a seed repeats a run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ps_server.errors import StalenessTimeout
from tests.simulation.processes import Process, Question, Task

END_S = 10.0


class _Abandoned(BaseException):
    """The run is over."""


class SecondThread:
    """Stands for `threading.Thread`.

    Args:
        process: of the launcher.
        target: its work.

    Attributes:
        error: what its work has raised.
        runs: whether it has the baton.
    """

    def __init__(self, process: Process, target: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self.runs = False
        self._process = process
        self._target = target
        self._forth, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._question = Question(lambda: True, "", 0.0)
        self._in_time = self._abandoned = self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """See `threading.Thread`."""
        self._thread.start()
        self._process.task(self._steps())

    def wait(self, question: Callable[[], object], timeout_s: float) -> bool:
        """Give the baton back until a question is answered with yes; return whether it was in
        time. The thread itself calls it.
        """
        self._question = Question(lambda: True if question() else None, "an answer", timeout_s)
        self._hand_over()
        return self._in_time

    def close(self) -> None:
        """End it, wherever it waits."""
        if self._thread.is_alive():
            self._abandoned = True
            self._forth.release()
            self._thread.join(END_S)

    def _steps(self) -> Task:
        while True:
            self.runs = True
            self._forth.release()
            self._back.acquire()
            self.runs = False
            if self._over:
                return
            try:
                yield self._question
            except StalenessTimeout:
                self._in_time = False
            else:
                self._in_time = True

    def _hand_over(self) -> None:
        self._back.release()
        self._forth.acquire()
        if self._abandoned:
            raise _Abandoned

    def _run(self) -> None:
        self._forth.acquire()
        try:
            if not self._abandoned:
                self._target()
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - the thread's outermost frame: the scenario judges it
            self.error = error
        finally:
            self._over = True
            self._back.release()
