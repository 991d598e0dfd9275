"""The line between a worker and its launcher."""

from __future__ import annotations

import io
import json

import pytest

from poseidon.engine.control import Control
from poseidon.engine.module.workplace import Standing
from poseidon.errors import JobError


def control(*commands: object) -> tuple[Control, io.StringIO]:
    outlet = io.StringIO()
    lines = "".join(json.dumps(command) + "\n" for command in commands)
    return Control(io.StringIO("no JSON\n[1]\n" + lines), outlet), outlet


def test_events_are_lines_of_json() -> None:
    line, outlet = control()
    line.tell("progress", iteration=3)
    line.tell("done")
    assert [json.loads(text) for text in outlet.getvalue().splitlines()] == [
        {"event": "progress", "iteration": 3},
        {"event": "done"},
    ]


def test_a_launcher_that_has_gone_hears_nothing() -> None:
    line, outlet = control()
    outlet.close()
    line.tell("done")


def test_addresses_come_by_command() -> None:
    line, _ = control({"do": "other"}, {"do": "connect", "shards": ["tcp://a:1"]})
    line.start()
    try:
        assert line.await_connect() == ["tcp://a:1"]
        assert line.gone.wait(10)
    finally:
        line.close()


@pytest.mark.parametrize(
    ("standing", "told"),
    [
        (None, {}),
        (Standing(steps=6, meetings=2, meeting="mean"), {"steps": 6, "meetings": 2, "meeting": "mean"}),
    ],
)
def test_a_sign_of_life_says_how_far_a_script_has_come(
    standing: Standing | None, told: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poseidon.engine.control.ALIVE_S", 0.0)
    line, outlet = control()
    line.standing = standing
    heard: list[str] = []

    def write(text: str) -> int:
        heard.append(text)
        line.close()
        return len(text)

    monkeypatch.setattr(outlet, "write", write)
    line._beat()
    assert json.loads(heard[0]) == {"event": "alive", "still_s": 0.0, "waited_s": 0.0, **told}


@pytest.mark.parametrize("commands", [(), ({"do": "stop"},)])
def test_a_stop_before_training_is_an_error(commands: tuple[object, ...]) -> None:
    line, _ = control(*commands)
    line.start()
    try:
        with pytest.raises(JobError, match="the job was stopped before training began"):
            line.await_connect()
    finally:
        line.close()
