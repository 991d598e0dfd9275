"""Events in order, resources one after another, and links whose queues take turns."""

from __future__ import annotations

from functools import partial

from benchmarks.simulation.event_queue import EventQueue, Message, OutgoingLink, SerialResource


def test_events_come_in_the_order_of_their_times_and_then_of_their_calls() -> None:
    events, seen = EventQueue(), []
    for when_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        events.at(when_s, partial(seen.append, name))
    events.at(1.5, lambda: events.at(3.0, partial(seen.append, "d")))
    events.run()
    assert (seen, events.now_s) == (["a", "b", "c", "d"], 3.0)


def test_a_pipe_does_one_piece_after_the_other() -> None:
    resource = SerialResource()
    assert [resource.take(now_s, 2.0) for now_s in (0.0, 1.0, 10.0)] == [2.0, 4.0, 12.0]


class Rig:
    """A link, and when what was delivered."""

    def __init__(self, **settings: float) -> None:
        self.events = EventQueue()
        self.link = OutgoingLink(self.events, **settings)
        self.resource = SerialResource()
        self.delivered: list[tuple[str, float]] = []

    def send(
        self,
        name: str,
        queue: str,
        urgency: int,
        out_s: float,
        through_s: float = 0.0,
        gives_way_to: str = "",
    ) -> None:
        through = ((self.resource, through_s),) if through_s else ()
        self.link.send(
            Message(
                queue=queue,
                urgency=(urgency,),
                out_s=out_s,
                through=through,
                delivered=lambda: self.delivered.append((name, self.events.now_s)),
                gives_way_to=gives_way_to,
            )
        )

    def run(self) -> list[tuple[str, float]]:
        self.events.run()
        return self.delivered


def test_queues_take_turns_and_each_sends_the_most_urgent() -> None:
    rig = Rig(latency_s=0.5)
    for name, queue, urgency in (
        ("a3", "a", 3),
        ("a2", "a", 2),
        ("a1", "a", 1),
        ("b1", "b", 1),
        ("b0", "b", 0),
    ):
        rig.send(name, queue, urgency, 1.0)
    assert rig.run() == [("a3", 1.5), ("b0", 2.5), ("a1", 3.5), ("b1", 4.5), ("a2", 5.5)]


def test_a_message_is_there_when_the_slowest_has_done_with_it() -> None:
    rig = Rig(buffer_s=100.0)
    rig.send("fast", "a", 0, 2.0, 1.0)
    rig.send("slow", "a", 1, 2.0, 5.0)
    assert rig.run() == [("fast", 2.0), ("slow", 7.0)]


def test_a_pipe_that_falls_behind_stops_its_queue_and_not_the_link() -> None:
    rig = Rig(buffer_s=1.0)
    rig.send("a0", "a", 0, 1.0, 4.0)  # the queue goes on at 3
    rig.send("a1", "a", 1, 1.0)
    rig.send("b0", "b", 0, 1.0)
    assert rig.run() == [("b0", 2.0), ("a0", 4.0), ("a1", 4.0)]


def test_who_gives_way_waits_for_all_of_another_queue_and_no_third_one_does() -> None:
    rig = Rig(buffer_s=1.0)
    rig.send("f0", "first", 0, 1.0, 4.0)  # the queue goes on at 3
    rig.send("f1", "first", 1, 1.0)
    rig.send("p", "push", 0, 1.0, gives_way_to="first")
    rig.send("v", "value", 0, 1.0)
    assert rig.run() == [("v", 2.0), ("f0", 4.0), ("f1", 4.0), ("p", 5.0)]
