"""The launcher names a straggler from what workers tell, and hands everything on."""

from __future__ import annotations

from collections.abc import Mapping

from poseidon.cluster.plan import ProcessName, Role
from poseidon.launch.straggler_watch import StragglerWatch

FAST = ProcessName(role=Role.WORKER, index=0, client=0, host="node0")
SLOW = ProcessName(role=Role.WORKER, index=1, client=1, host="node1")


class Heard:
    """Callbacks that count."""

    def __init__(self) -> None:
        self.count = 0

    def on_started(self) -> None:
        self.count += 1

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        self.count += 1

    def on_log(self, name: ProcessName, line: str) -> None:
        self.count += 1


def test_a_worker_that_never_waits_while_the_other_does_is_named() -> None:
    heard, said, now = Heard(), list[str](), [0.0]
    watch = StragglerWatch(heard, said.append, now=lambda: now[0])
    watch.on_started()
    watch.on_log(FAST, "a line")
    for second in range(0, 200, 2):
        now[0] = float(second)
        for name, waited_s in ((FAST, second / 2), (SLOW, 0.0)):
            watch.on_event(name, {"event": "progress", "iteration": second})
            watch.on_event(name, {"event": "alive", "waited_s": waited_s})
    assert heard.count == 2 + 4 * 100
    (sentence,) = said
    assert sentence.startswith("worker 1 (client 1, node1) holds the others up")


def test_what_does_not_say_how_long_it_waited_names_nobody() -> None:
    said = list[str]()
    watch = StragglerWatch(Heard(), said.append, now=lambda: 0.0)
    for event in ({"event": "alive"}, {"event": "alive", "waited_s": "long"}, {"event": "progress"}):
        watch.on_event(SLOW, event)
    assert said == []
