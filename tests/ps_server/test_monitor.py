"""Waiting: woken for an answer, a failure or the end, never in vain, and no longer than agreed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from ps_server.errors import LocalProtocolError, PeerLost, ServerError, StalenessTimeout
from ps_server.monitor import Monitor, owned_thread

T = TypeVar("T")

LONG_S = 20.0


def monitor(timeout_s: float = LONG_S) -> Monitor:
    return Monitor(timeout_s, closed="the store is closed", hangs=": a peer hangs")


class Waiting:
    """A thread that waits; `entered` is set each time that its question is asked."""

    def __init__(
        self, shared: Monitor, question: Callable[[], object], *, limited: bool = True
    ) -> None:
        self.asked_by: list[int] = []
        self.result: object = None
        self._question = question
        self._shared = shared
        self._asked = threading.Event()
        self._limited = limited
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._asked.wait(LONG_S)
        with shared:  # the thread has let go of the lock, so it waits
            pass

    def _ask(self) -> object:
        self.asked_by.append(threading.get_ident())
        found = self._question()
        self._asked.set()
        return found

    def _run(self) -> None:
        try:
            self.result = self._shared.wait_for(self._ask, "nothing came", limited=self._limited)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.result = error

    def end(self) -> object:
        """Return what the wait returned or raised."""
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()
        return self.result

    def wakes(self) -> int:
        """Return how often the thread itself has asked its question since it has waited."""
        return self.asked_by.count(self._thread.ident or 0) - 1


def test_an_answer_that_is_there_is_returned_at_once() -> None:
    assert monitor(0.0).wait_for(lambda: 3, "nothing came") == 3
    failed = monitor()
    failed.fail(PeerLost("lost"))
    failed.close()
    # an answer may be false, and comes before a failure
    assert failed.wait_for(lambda: 0, "nothing came") == 0


def test_a_wait_ends_with_the_answer() -> None:
    shared, found = monitor(), list[str]()
    waiting = Waiting(shared, lambda: found[0] if found else None)
    with shared:
        found.append("value")
        shared.notify()
    assert waiting.end() == "value"


def test_only_the_thread_with_an_answer_is_woken() -> None:
    shared, counts = monitor(), {"one": 0, "other": 0}
    waiting = {name: Waiting(shared, lambda name=name: counts[name] or None) for name in counts}
    for _ in range(5):
        shared.notify()
    counts["one"] = 1
    shared.notify()
    assert waiting["one"].end() == 1
    assert waiting["other"].wakes() == 0
    counts["other"] = 2
    shared.notify()
    assert waiting["other"].end() == 2
    assert [each.wakes() for each in waiting.values()] == [0, 0]  # `notify` has asked for them


def test_an_answer_that_is_handed_out_once_is_kept() -> None:
    shared, answers = monitor(), list[str]()
    waiting = Waiting(shared, lambda: answers.pop(0) if answers else None)
    with shared:
        answers += ["first", "second"]
        shared.notify()
        shared.notify()
    assert waiting.end() == "first"
    assert answers == ["second"]


def test_a_wait_that_lasts_too_long_is_one_sentence() -> None:
    with pytest.raises(StalenessTimeout, match=r"^it did not come within 0\.01 s: a peer hangs$"):
        monitor(0.01).wait_for(lambda: None, "it did not come")
    with pytest.raises(StalenessTimeout, match=r"^it did not come within 0\.01 s; missing"):
        monitor(0.01).wait_for(lambda: None, "it did not come", hangs=lambda: "; missing: worker 1")


def test_an_answer_that_comes_with_the_deadline_counts() -> None:
    answers = iter((None, "late"))
    assert monitor(0.01).wait_for(lambda: next(answers), "nothing came") == "late"


@pytest.mark.parametrize("limited", [True, False])
def test_the_first_failure_ends_every_wait_now_and_later(limited: bool) -> None:
    shared = monitor()
    waits = [Waiting(shared, lambda: None, limited=limited) for _ in range(3)]
    first = PeerLost("first")
    shared.fail(first)
    shared.fail(PeerLost("second"))
    assert [waiting.end() for waiting in waits] == [first] * 3
    with pytest.raises(PeerLost, match=r"^first$"):
        shared.wait_for(lambda: None, "")


@pytest.mark.parametrize("limited", [True, False])
def test_closing_ends_every_wait_now_and_later(limited: bool) -> None:
    shared = monitor()
    shared.check()
    waiting = Waiting(shared, lambda: None, limited=limited)
    shared.close()
    ended = waiting.end()
    assert isinstance(ended, LocalProtocolError)
    assert str(ended) == "the store is closed"
    with pytest.raises(LocalProtocolError, match=r"^the store is closed$"):
        shared.wait_for(lambda: None, "")


def test_what_a_question_raises_belongs_to_the_thread_that_waits() -> None:
    shared, broken = monitor(), list[ServerError]()

    def question() -> None:
        if broken:
            raise broken[0]

    waiting = Waiting(shared, question)
    broken.append(PeerLost("here"))
    shared.notify()  # raises nothing
    assert waiting.end() is broken[0]
    with pytest.raises(PeerLost, match=r"^here$"):
        shared.wait_for(question, "")


def test_a_question_may_take_the_lock() -> None:
    shared = monitor()

    def question() -> int:
        with shared:
            return 1

    with shared:
        assert shared.wait_for(question, "") == 1


def test_what_ends_a_thread_is_given_to_its_owner() -> None:
    found: list[Exception] = []
    for work in (lambda: {}["missing"], list):
        thread = owned_thread("owned", work, found.append)
        thread.start()
        thread.join()
        assert (thread.name, thread.daemon) == ("owned", True)
    assert [type(error) for error in found] == [KeyError]
