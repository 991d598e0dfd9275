"""The heartbeat of a worker."""

from __future__ import annotations

import pytest
import torch

from poseidon.base.call_names import LoopPosition
from poseidon.engine.heartbeat import HeartbeatSender, gpu_reading


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {
            "most_lead": 2,
            "position": LoopPosition(iterations=6, collections=2, collection="mean"),
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

    heartbeat = HeartbeatSender(send)
    heartbeat.facts.update(facts)
    wanted = iter([False, True])
    heartbeat.run(lambda: next(wanted))
    (event,) = sent
    assert event.pop("read_s") >= 0.0  # type: ignore[operator]
    assert event.pop("sending_s") == {}
    assert 0.0 <= event.pop("host_busy") <= 1.0  # type: ignore[operator]
    assert event == {"event": "alive", "still_s": 0.0, "waited_s": 0.0, **facts}


def refuse(device: torch.device) -> int:
    raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")


def test_without_the_extra_a_reading_has_the_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    assert gpu_reading(torch.device("cpu")) == {}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    monkeypatch.setattr(torch.cuda, "temperature", refuse)
    memory = {"memory_bytes": 5 << 30, "total_bytes": 8 << 30}
    assert gpu_reading(gpu) == memory
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 75)
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 61)
    assert gpu_reading(gpu) == {**memory, "busy": 0.75, "temperature_c": 61}
