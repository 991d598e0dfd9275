"""The heartbeat of a worker."""

from __future__ import annotations

import pytest

from poseidon.engine.heartbeat import Heartbeat
from poseidon.engine.session import LoopPosition


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {
            "most_lead": 2,
            **LoopPosition(iterations=6, collections=2, collection="mean").to_fields(),
        },
    ],
)
def test_it_has_the_facts_of_the_work(
    facts: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poseidon.engine.heartbeat.HEARTBEAT_S", 0.0)
    sent: list[dict[str, object]] = []

    def send(event: str, **fields: object) -> None:
        sent.append({"event": event, **fields})
        heartbeat.close()

    heartbeat = Heartbeat(send)
    heartbeat.facts.update(facts)
    wanted = iter([False, True])
    heartbeat.run(lambda: next(wanted))
    (event,) = sent
    assert event.pop("read_s") >= 0.0  # type: ignore[operator]
    assert event.pop("sending_s") == {}
    assert 0.0 <= event.pop("host_busy") <= 1.0  # type: ignore[operator]
    assert event == {"event": "alive", "still_s": 0.0, "waited_s": 0.0, **facts}
