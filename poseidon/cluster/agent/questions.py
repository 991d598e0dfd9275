"""What waits for the reports of an agent: its processes, and questions.

Law: each question has one answer, also when the agent is lost.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from poseidon.cluster.agent import messages as m
from poseidon.cluster.agent.remote_process import Loss, RemoteProcess
from poseidon.errors import JobError, printable

ANSWER_S = 60.0
PARTS_UNDER_WAY = 16


class Question:
    """A request that waits for its answer.

    Args:
        number: its id on the wire.
        label: the host in messages.
        kind: of its answer.
    """

    def __init__(self, number: int, label: str, kind: type[m.Answer | m.Content]) -> None:
        self.id = number
        self._label = label
        self._kind = kind
        self.done = threading.Event()
        self.report: m.Report | None = None

    def take(self, report: m.Report) -> bool:
        """Take the answer; return whether it is one.

        Raises:
            WireError: it answers a question of another kind.
        """
        if not isinstance(report, m.Answer | m.Content | m.Refused):
            return False
        if not isinstance(report, self._kind | m.Refused):
            raise m.WireError(f"{type(report).__name__} in place of {self._kind.__name__}")
        self.report = report
        self.done.set()
        return True

    def lose(self, loss: Loss) -> None:
        """Have the question refused, because the agent is lost."""
        self.take(m.Refused(id=m.AGENT_ITSELF, message=loss.why))

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """Wait for the answer.

        Raises:
            JobError: it is refused, or does not come in time.
        """
        if not self.done.wait(timeout_s):
            raise JobError(f"{self._label}: no answer within {timeout_s:g} s")
        if isinstance(self.report, m.Refused):
            raise JobError(f"{self._label}: {printable(self.report.message)}")
        return self.report


def in_order(questions: Iterable[Question]) -> Iterator[Any]:
    """Yield the answers to questions, some of which are asked ahead."""
    under_way: deque[Question] = deque()
    for question in questions:
        under_way.append(question)
        if len(under_way) >= PARTS_UNDER_WAY:
            yield under_way.popleft().answer()
    while under_way:
        yield under_way.popleft().answer()


_R = TypeVar("_R", Question, RemoteProcess)


class Recipients:
    """The processes and questions of one agent, by the ids of their reports."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._by_id: dict[int, Question | RemoteProcess] = {}
        self.loss: Loss | None = None

    def add(self, make: Callable[[int], _R]) -> _R:
        """Return what `make` makes with a new id; it gets reports, and learns of the loss."""
        made = make(next(self._ids))
        with self._lock:
            self._by_id[made.id] = made
        if self.loss is not None:
            made.lose(self.loss)
        return made

    def take(self, number: int, report: m.Report) -> None:
        """Pass a report on. The last one of a process or a question ends its entry."""
        recipient = self._by_id.get(number)
        if recipient is not None and recipient.take(report):
            with self._lock:
                self._by_id.pop(number, None)

    def lose(self, loss: Loss) -> list[Callable[[], None]]:
        """Note the loss; return the calls that tell it. Only the first loss counts."""
        with self._lock:
            if self.loss is not None:
                return []
            self.loss = loss
            return [partial(one.lose, loss) for one in self._by_id.values()]
