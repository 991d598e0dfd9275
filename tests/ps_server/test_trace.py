from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from ps_server import trace as module
from ps_server.trace import NO_TRACE, Trace, Tracer, Track, describe_process


def events(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(found, list)
    return found


def spans(path: Path) -> dict[str, dict[str, Any]]:
    return {event["name"]: event for event in events(path) if event["ph"] == "X"}


def test_each_event_has_the_keys_of_the_format(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.json", process="worker 3", order=3)
    began = trace.now()
    trace.span(Track.SEND, "send", "conv1.w", began, bytes=12, shard=1)
    trace.count("queue", messages=4)
    trace.close()
    found = events(tmp_path / "t.json")
    assert all(isinstance(event["pid"], int) and event["ph"] in "MXC" for event in found)
    assert {
        "ph": "M",
        "name": "process_name",
        "pid": found[0]["pid"],
        "args": {"name": "worker 3"},
    } in found
    (span,) = spans(tmp_path / "t.json").values()
    assert span["name"] == "send conv1.w"
    assert span["cat"] == "send"
    assert span["tid"] == Track.SEND.value
    assert span["args"] == {"bytes": 12, "shard": 1}
    assert span["ts"] > 1e15  # microseconds since 1970
    assert span["dur"] >= 0
    (counter,) = (event for event in found if event["ph"] == "C")
    assert counter["args"] == {"messages": 4}
    assert counter["ts"] >= span["ts"]


def test_names_and_facts_are_text_of_any_kind(tmp_path: Path) -> None:
    odd = 'a "b" \\ \n \u00e9{}'
    trace = Trace(tmp_path / "t.json", process=odd)
    for _ in range(2):
        trace.span(Track.SEND, "send", odd, trace.now(), fact=odd, number=1.5)
    trace.close()
    sent = [event for event in events(tmp_path / "t.json") if event["ph"] == "X"]
    assert [event["name"] for event in sent] == [f"send {odd}"] * 2
    assert sent[0]["args"] == {"fact": odd, "number": 1.5}


def test_a_disk_that_is_full_is_an_error_of_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_EVERY_S", 0.1)
    trace = Trace(tmp_path / "t.json", process="worker 0")
    trace._file.close()
    trace._file = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - `close` closes it
    trace.span(Track.SEND, "send", "w", trace.now())
    trace._thread.join()
    trace.span(Track.SEND, "send", "w", trace.now())
    with pytest.raises(OSError, match="No space left"):
        trace.close()
    trace.close()


def test_every_track_has_a_name() -> None:
    named = [event for event in describe_process(1, "shard 0", 0) if event["name"] == "thread_name"]
    assert [event["tid"] for event in named] == [track.value for track in Track]


def test_what_was_nested_stays_nested_however_short(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.json", process="worker 0")
    base = trace.now()
    for shift in range(0, 3000, 7):
        trace.span(Track.COMPUTE, "inner", str(shift), base + shift + 10, base + shift + 1010)
        trace.span(Track.COMPUTE, "outer", str(shift), base + shift, base + shift + 1011)
    trace.close()
    found = spans(tmp_path / "t.json")
    for shift in range(0, 3000, 7):
        inner, outer = found[f"inner {shift}"], found[f"outer {shift}"]
        assert outer["ts"] <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_two_traces_of_a_machine_lie_on_one_axis(tmp_path: Path) -> None:
    one, two = (Trace(tmp_path / f"{i}.json", process=str(i)) for i in range(2))
    for i in range(5):
        one.count("c", value=2 * i)
        two.count("c", value=2 * i + 1)
    one.close()
    two.close()
    counted = [e for i in range(2) for e in events(tmp_path / f"{i}.json") if e["ph"] == "C"]
    in_time = sorted(counted, key=lambda event: float(event["ts"]))
    # The two readings of the clocks at the start may lie some microseconds apart; the order of ten
    # says enough.
    assert max(e["ts"] for e in in_time) - min(e["ts"] for e in in_time) < 5e6


def test_a_killed_process_leaves_whole_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_EVERY_S", 0.001)
    trace = Trace(tmp_path / "t.json", process="worker 0")
    trace.span(Track.COMPUTE, "forward", "conv1", trace.now())
    pause = threading.Event()
    for _ in range(2000):
        text = (tmp_path / "t.json").read_text(encoding="utf-8")
        if "forward conv1" in text:
            break
        pause.wait(0.005)
    assert json.loads(text + "]")[-1]["name"] == "forward conv1"
    trace.close()


def test_more_than_the_bounds_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 20)
    trace = Trace(tmp_path / "t.json", process="worker 0", most_events=10)
    monkeypatch.setattr(trace, "_write_piece", lambda: None)  # nothing is written before the end
    for i in range(30):
        trace.span(Track.COMPUTE, "forward", str(i), trace.now())
    monkeypatch.undo()
    trace.close()
    assert len(spans(tmp_path / "t.json")) == 10
    assert events(tmp_path / "t.json")[-1]["args"] == {"count": 20}


@pytest.mark.parametrize("most_waiting", [2000, 0])
def test_threads_may_record_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_waiting: int
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", most_waiting)
    trace = Trace(tmp_path / "t.json", process="worker 0")
    together = threading.Barrier(4)

    def record(thread: int) -> None:
        together.wait()
        for i in range(500):
            trace.span(Track.SEND, "send", f"{thread}-{i}", trace.now())

    threads = [threading.Thread(target=record, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    trace.close()
    assert len(spans(tmp_path / "t.json")) == most_waiting
    dropped = [e["args"]["count"] for e in events(tmp_path / "t.json") if "dropped" in e["name"]]
    assert sum(dropped) == 2000 - most_waiting


def test_no_trace_takes_the_same_calls() -> None:
    assert NO_TRACE.now() == 0
    NO_TRACE.span(Track.COMPUTE, "forward", "conv1", 0, 1, bytes=3)
    NO_TRACE.count("queue", messages=1)
    NO_TRACE.close()
    public = {name for name in vars(Trace) if not name.startswith("_")}
    assert public == {name for name in dir(Tracer) if not name.startswith("_")}


def test_an_unwritable_file_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        Trace(tmp_path / "nowhere" / "t.json", process="worker 0")
