"""What a waiting thread wants to know. Whoever learns something new asks on its behalf, and wakes it when there is an answer.

Law: the question is put until it has its first answer, and never again: answers may be handed out only once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Inquiry(Generic[T]):
    """A question and, once there is one, its answer. All calls under one lock.

    Args:
        question: gives None as long as there is no answer.
    """

    __slots__ = ("_question", "answer")

    def __init__(self, question: Callable[[], T | None]) -> None:
        self._question = question
        self.answer: T | None = None

    def ask(self) -> T | None:
        """The answer, or None."""
        if self.answer is None:
            self.answer = self._question()
        return self.answer
