"""Simulated processes: loops of the real code, step by step, and tasks that wait.

A loop is a generator of the real code that yields, before each wait for messages, the most seconds
that it lasts. A task is a generator of a scenario. It yields seconds, for which it computes, or a
question, and gets its answer. Questions are asked again after each step of the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

from ps_server.errors import StalenessTimeout
from tests.simulation.world import World

STEP_S = 0.00005
LATE, LATE_S = 3, 0.02
"""A wait that nothing ends may last so many times as long, or at least so many seconds: it is
simulated with fewer events."""


class Question(NamedTuple):
    """What a task waits for: `ask` returns None until there is an answer, or raises.

    One that is not polled is asked only when `Process.changed`.
    """

    ask: Callable[[], Any]
    text: str
    timeout_s: float
    polled: bool = True


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
        self.changed = False
        """Whether the stand-ins for events, conditions and queues have changed since `ask_all`."""
        self.on_death: list[Callable[[bool], None]] = []
        self._stopped_until_s = 0.0
        self._random = world.stream(f"process {name}")
        self._steps = 0
        self._loops: list[Loop] = []
        self._tasks: list[Running] = []

    def delay_s(self) -> float:
        """Return the seconds until the next step."""
        world, wait_s = self.world, STEP_S
        if self._stopped_until_s > world.now:
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
        changed, self.changed = self.changed, False
        for task in self._tasks:
            question = task.question
            if question is not None and (changed or question.polled):
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
        self._soon = self._over = False
        self._due_s = self._timer_s = math.inf
        """When its wait ends, and when the first event comes that sees to it."""

    def wake(self) -> None:
        """Let it make a step soon."""
        if not self._soon and not self._over:
            self._soon = True
            self._process.world.after(self._process.delay_s(), self._step)

    def _wait(self, seconds: float) -> None:
        """Make a step when a wait has ended; an event of an earlier wait comes first, if it can."""
        world = self._process.world
        self._due_s = world.now + seconds
        if self._due_s < self._timer_s:
            self._timer_s = self._due_s
            world.after(seconds, self._time_out, self._due_s)

    def _time_out(self, timer_s: float) -> None:
        if timer_s != self._timer_s or self._over:
            return
        self._timer_s = math.inf
        process = self._process
        if self._soon or not process.alive:
            return
        if process.world.now < self._due_s:
            self._timer_s = self._due_s
            process.world.at(self._due_s, self._time_out, self._due_s)
        else:
            self._soon = True
            self._step()

    def _step(self) -> None:
        process = self._process
        if not process.alive:
            return
        if process.stopped_s:
            process.world.after(process.delay_s(), self._step)
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
            if not self._soon:
                self._wait(max(LATE * wait_s, LATE_S))
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
        self.question: Question | None = None
        """That it waits for."""
        self._due_s = self._timer_s = math.inf
        """When its question has waited too long, and when the next event comes that sees to it."""
        self.error: Exception | None = None
        self.over = False
        process.world.open_tasks += 1

    @property
    def waits_for(self) -> str:
        """What it waits for."""
        return self.question.text if self.question else "its computation"

    def end(self) -> None:
        """Make no further step."""
        if not self.over:
            self.over, self.question = True, None
            self._process.world.open_tasks -= 1

    def begin(self) -> None:
        """Make the first step."""
        self._go_on(None, None)

    def ask(self) -> None:
        """Ask its question, if it waits."""
        question = self.question
        if question is None or not self._process.alive:
            return
        try:
            answer = question.ask()
        except Exception as error:  # noqa: BLE001 - raised in the task, whose question it is
            self.question = None
            self._resume(0.0, None, error)
            return
        if answer is not None:
            self.question = None
            self._resume(0.0, answer, None)

    def _resume(self, after_s: float, value: object, error: Exception | None) -> None:
        world = self._process.world
        world.after(after_s + self._process.delay_s(), self._go_on, value, error)

    def _go_on(self, value: object, error: Exception | None) -> None:
        process = self._process
        if not process.alive or self.over:
            return
        if process.stopped_s:
            self._resume(0.0, value, error)
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
            self.question = wanted
            self._due_s = process.world.now + wanted.timeout_s
            if self._due_s < self._timer_s:
                self._timer_s = self._due_s
                process.world.at(self._due_s, self._time_out, self._due_s)
            self.ask()
        else:
            self._resume(wanted, None, None)

    def _time_out(self, timer_s: float) -> None:
        if timer_s != self._timer_s:
            return
        self._timer_s = math.inf
        if self.question is None:
            return
        if self._process.world.now < self._due_s:
            self._timer_s = self._due_s
            self._process.world.at(self._due_s, self._time_out, self._due_s)
            return
        text, self.question = self.question.text, None
        self._go_on(None, StalenessTimeout(f"{text}: in vain"))
