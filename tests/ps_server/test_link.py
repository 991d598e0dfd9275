"""Who uses a link first."""

from __future__ import annotations

from ps_server.link import LinkPriority


def test_a_link_is_free_until_it_is_taken_and_the_second_sender_is_woken_once() -> None:
    link, woken = LinkPriority(), list[bool]()
    link.when_free(lambda: woken.append(link.is_free))
    assert link.is_free
    link.free()
    assert woken == []  # it has waited for nothing
    link.take()
    link.take()
    assert not link.is_free
    link.free()
    link.free()
    assert woken == [True]


def test_nobody_need_wait() -> None:
    link = LinkPriority()
    link.take()
    link.free()
    assert link.is_free
