"""What waits for a peer leaves by urgency, and a table's pairs in their order."""

from __future__ import annotations

from poseidon.exchange.outbox import FIRST, LAST, Outbox


def filled(*tables: int) -> Outbox:
    outbox = Outbox()
    for number, table in enumerate(tables):
        outbox.add(table, [b"%d" % number])
    return outbox


def emptied(outbox: Outbox) -> list[tuple[int, bytes]]:
    taken = []
    while outbox:
        waiting = outbox.take()
        taken.append((waiting.priority, bytes(waiting.frames[0])))
    return taken


def test_what_is_needed_first_overtakes_and_a_table_keeps_its_order() -> None:
    said = emptied(filled(2, 1, 2, 0, 1))
    assert said == [(0, b"3"), (1, b"1"), (1, b"4"), (2, b"0"), (2, b"2")]


def test_the_greeting_comes_first_and_the_goodbye_last() -> None:
    assert [table for table, _ in emptied(filled(LAST, 1, FIRST))] == [FIRST, 1, LAST]


def test_what_could_not_be_sent_is_where_it_was() -> None:
    outbox = filled(1, 1, 0)
    first = outbox.take()
    outbox.put_back(first)
    assert [frame for _, frame in emptied(outbox)] == [b"2", b"0", b"1"]


def test_nothing_waits_for_a_peer_that_has_gone() -> None:
    outbox = filled(1, 2)
    outbox.clear()
    assert not outbox
