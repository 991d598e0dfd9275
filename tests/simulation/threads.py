"""Threads that block, in a simulated process: they hand one baton around.

A thread is a task of its process. The task hands the baton to a thread of this process, and gets it
back when that waits, so only one of them runs at any time and a seed repeats a run. The code of a
thread is the real one: `Primitives` (`launcher.py`) stand for what it waits with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ps_server.errors import StalenessTimeout
from tests.simulation.processes import Process, Question, Task

END_S = 10.0


class Abandoned(SystemExit):
    """The run is over. A worker reports every other error of its work."""


class BatonThread:
    """Stands for `threading.Thread`.

    Args:
        process: it is in.
        target: its work.
        wait: lets time pass (`Primitives.wait`).
        name: of the thread; None: any.

    Attributes:
        process: as given.
        name: see `threading.Thread`.
        error: what its work has raised.
        over: whether its work has ended.
        ident: see `threading.Thread`: None before it has started.
    """

    def __init__(
        self,
        process: Process,
        target: Callable[[], object],
        wait: Callable[[Callable[[], object], float | None], bool],
        name: str | None = None,
    ) -> None:
        self.process = process
        self.ident: int | None = None
        self._let_pass = wait
        self.error: BaseException | None = None
        self.over = False
        self._target = target
        self._forth, self._back = threading.Lock(), threading.Lock()
        self._forth.acquire()
        self._back.acquire()
        self._question = Question(lambda: True, "", 0.0)
        self._in_time = self._abandoned = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.name = self._thread.name

    def start(self) -> None:
        """See `threading.Thread`."""
        self.process.world.threads.append(self)
        self._thread.start()
        self.ident = self._thread.ident
        self.process.task(self._steps())

    def is_alive(self) -> bool:
        """See `threading.Thread`."""
        return not self.over

    def join(self, timeout_s: float | None = None) -> None:
        """See `threading.Thread`."""
        self._let_pass(lambda: self.over, timeout_s)

    def wait(self, question: Callable[[], object], timeout_s: float) -> bool:
        """Give the baton back until a question is answered with yes; return whether it was in
        time. The thread itself calls it.
        """
        if self._abandoned:
            raise Abandoned
        self._question = Question(
            lambda: True if question() else None, "an answer", timeout_s, polled=False
        )
        self._back.release()
        self._forth.acquire()
        if self._abandoned:
            raise Abandoned
        return self._in_time

    def close(self) -> None:
        """End it, wherever it waits."""
        if self.over or self._abandoned:
            return
        world = self.process.world
        self._abandoned, world.running = True, self
        self._forth.release()
        self._thread.join(END_S)
        world.running = None

    def _steps(self) -> Task:
        world = self.process.world
        while True:
            world.running = self
            self._forth.release()
            self._back.acquire()
            world.running = None
            self.process.ask_all()  # others of this process may have waited for this
            if self.over:
                if self.error is not None:
                    raise self.error
                return
            try:
                yield self._question
            except StalenessTimeout:
                self._in_time = False
            else:
                self._in_time = True

    def _run(self) -> None:
        self._forth.acquire()
        try:
            if not self._abandoned:
                self._target()
        except Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - the thread's outermost frame: the scenario judges it
            self.error = None if self._abandoned else error
        finally:
            self.over = self.process.changed = True
            self._back.release()


class Lock:
    """Stands for `threading.Lock` and `threading.RLock`: one thread runs at a time, and none waits
    while it holds one.
    """

    def acquire(self) -> bool:
        """See `threading.Lock`."""
        return True

    def release(self) -> None:
        """See `threading.Lock`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass
