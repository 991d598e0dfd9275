"""Questions of waiting threads."""

from __future__ import annotations

from ps_server.inquiry import Inquiry


def test_an_answer_that_is_handed_out_once_is_kept() -> None:
    answers = [None, "first", "second"]
    inquiry = Inquiry(lambda: answers.pop(0))
    assert [inquiry.ask() for _ in range(4)] == [None, "first", "first", "first"]
    assert answers == ["second"]


def test_an_answer_may_be_false() -> None:
    answers = [0, 1]
    inquiry = Inquiry(lambda: answers.pop(0))
    assert [inquiry.ask(), inquiry.ask()] == [0, 0]
