"""Simulated processes: loops of the real code, step by step, and tasks that wait.

A loop is a generator of the real code that yields, before each wait for messages, the most seconds
that it lasts. A task is a generator of a scenario. It yields seconds, for which it computes, or a
question, and gets its answer. Questions are asked again after each step of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

from ps_server.errors import StalenessTimeout
from tests.simulation.world import World

STEP_S = 0.00005
LONG_S, LATE = 0.4, 3


class Question(NamedTuple):
    """What a task waits for: `ask` returns None until there is an answer, or raises."""

    ask: Callable[[], Any]
    text: str
    timeout_s: float


Task = Generator[float | Question, Any, None]


class Process:
    """One process.

    Args:
        world: it runs in.
        name: of the process.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.on_death: list[Callable[[bool], None]] = []
        self._stopped_until_s = 0.0
        self._random = world.stream(f"process {name}")
        self._steps = 0
        self._loops: list[Loop] = []
        self._tasks: list[Running] = []

    def delay_s(self) -> float:
        """Return the seconds until the next step."""
        world = self.world
        wait_s = max(STEP_S, self.stopped_s)
        if world.slow_p:
            self._steps += 1
            if self._random.random() < world.slow_p:
                slow_s = self._random.random() * world.slow_s
                if world.deviates(f"{self.name} step {self._steps} slow"):
                    wait_s += slow_s
        return wait_s

    def stop(self, seconds: float) -> None:
        """Stop it for some time (SIGSTOP, a suspended machine)."""
        self._stopped_until_s = max(self._stopped_until_s, self.world.now + seconds)

    @property
    def stopped_s(self) -> float:
        """How long it is still stopped."""
        return max(0.0, self._stopped_until_s - self.world.now)

    def kill(self, *, silent: bool = False) -> None:
        """End it at once; `silent`: with its host, so that connections end without a word."""
        if self.alive:
            self.alive = False
            for task in self._tasks:
                task.end()
            for call in self.on_death:
                call(silent)

    def loop(
        self, steps: Iterator[float], failed: Callable[[Exception], None], ended: Callable[[], None]
    ) -> Loop:
        """Run a loop; what it raises goes to `failed`, and its end to `ended`."""
        loop = Loop(self, steps, failed, ended)
        self._loops.append(loop)
        loop.wake()
        return loop

    def task(self, task: Task) -> Running:
        """Run a task."""
        running = Running(self, task)
        self._tasks.append(running)
        self.world.after(self.delay_s(), running.begin)
        return running

    def ask_all(self) -> None:
        """Ask the questions of the tasks that wait."""
        for task in self._tasks:
            task.ask()


class Loop:
    """See `Process.loop`."""

    def __init__(
        self,
        process: Process,
        steps: Iterator[float],
        failed: Callable[[Exception], None],
        ended: Callable[[], None],
    ) -> None:
        self._process = process
        self._steps = steps
        self._failed = failed
        self._ended = ended
        self._timer = 0
        self._soon = False
        self._over = False

    def wake(self) -> None:
        """Let it make a step soon."""
        if not self._soon and not self._over:
            self._soon = True
            self._schedule(self._process.delay_s())

    def _schedule(self, seconds: float) -> None:
        self._timer += 1
        timer = self._timer
        self._process.world.after(seconds, lambda: self._step(timer))

    def _step(self, timer: int) -> None:
        process = self._process
        if timer != self._timer or not process.alive:
            return
        if not self._soon and process.stopped_s:
            self.wake()  # a timer of a stopped process
            return
        self._soon = False
        try:
            wait_s = next(self._steps)
        except StopIteration:
            self._over = True
            self._ended()
        except Exception as error:  # noqa: BLE001 - as the real thread's outermost frame
            self._over = True
            self._failed(error)
        else:
            if not self._soon:  # a long wait may end late; fewer of them are simulated
                self._schedule(wait_s if wait_s < LONG_S else LATE * wait_s)
        process.ask_all()


class Running:
    """A task of a process.

    Attributes:
        error: what has ended it; None: nothing, or its own end.
        over: whether it has ended.
    """

    def __init__(self, process: Process, task: Task) -> None:
        self._process = process
        self._task = task
        self._question: Question | None = None
        self._asked = 0
        self.error: Exception | None = None
        self.over = False
        process.world.open_tasks += 1

    @property
    def waits_for(self) -> str:
        """What it waits for."""
        return self._question.text if self._question else "its computation"

    def end(self) -> None:
        """Make no further step."""
        if not self.over:
            self.over = True
            self._process.world.open_tasks -= 1

    def begin(self) -> None:
        """Make the first step."""
        self._go_on(None)

    def ask(self) -> None:
        """Ask its question, if it waits."""
        question = self._question
        if question is None or not self._process.alive:
            return
        try:
            answer = question.ask()
        except Exception as error:  # noqa: BLE001 - raised in the task, whose question it is
            self._question = None
            self._resume(lambda error=error: self._go_on(None, error))
            return
        if answer is not None:
            self._question = None
            self._resume(lambda: self._go_on(answer))

    def _resume(self, call: Callable[[], None]) -> None:
        self._process.world.after(self._process.delay_s(), call)

    def _go_on(self, value: object, error: Exception | None = None) -> None:
        if not self._process.alive or self.over:
            return
        try:
            wanted = self._task.send(value) if error is None else self._task.throw(error)
        except StopIteration:
            self.end()
            return
        except Exception as failure:  # noqa: BLE001 - the scenario judges it
            self.error = failure
            self.end()
            return
        if isinstance(wanted, Question):
            self._question = wanted
            self._asked += 1
            asked = self._asked
            self._process.world.after(wanted.timeout_s, lambda: self._time_out(asked))
            self.ask()
        else:
            self._resume_after(wanted)

    def _resume_after(self, seconds: float) -> None:
        self._process.world.after(seconds, lambda: self._resume(lambda: self._go_on(None)))

    def _time_out(self, asked: int) -> None:
        if self._question is not None and asked == self._asked:
            text, self._question = self._question.text, None
            self._go_on(None, StalenessTimeout(f"{text}: in vain"))
