from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from poseidon.errors import JobError
from poseidon.observe.metrics.trace_iteration import (
    Event,
    Transfer,
    merge,
    read_trace,
    trace_files,
    view_iteration,
)
from ps_server.trace import Trace, Track

COMPUTE, SEND, RECEIVE, REBUILD = 1, 2, 3, 7


def span(row: int, kind: str, name: str, begin_ms: float, end_ms: float) -> Event:
    return {
        "ph": "X",
        "name": f"{kind} {name}",
        "cat": kind,
        "pid": 9,
        "tid": row,
        "ts": 5e9 + 1000 * begin_ms,
        "dur": 1000 * (end_ms - begin_ms),
    }


def events(iterations: int = 4) -> list[Event]:
    """Iterations of 100 ms: `a.0` is waited for, `b.0` is there in time, its last chunk comes
    later than its first.
    """
    found: list[Event] = [
        {"ph": "M", "name": "thread_name", "pid": 9, "tid": COMPUTE, "args": {"name": "compute"}},
        {"ph": "C", "name": "queue", "pid": 9, "ts": 5e9, "args": {"messages": 1}},
    ]
    for i in range(iterations):
        t = 100.0 * i
        found += [
            span(COMPUTE, "wait", "a.0", t + 1, t + 11),
            span(COMPUTE, "forward", "a", t, t + 20),
            span(COMPUTE, "wait", "b.0", t + 20, t + 20.5),
            span(COMPUTE, "forward", "b", t + 20, t + 40),
            span(COMPUTE, "begin", "b.0", t + 60, t + 61),
            span(COMPUTE, "begin", "a.0", t + 90, t + 91),
            span(SEND, "send", "b.0", t + 61, t + 62),
            span(RECEIVE, "receive", "b.0", t + 70, t + 71),
            span(REBUILD, "apply", "b.0", t + 80, t + 81),
            span(RECEIVE, "receive", "a.0", t + 108, t + 110),
            span(COMPUTE, "iteration", str(i), t, t + 99),
        ]
    return found


def test_ways_end_with_the_last_piece_and_waits_are_those_of_the_next_iteration() -> None:
    view = view_iteration(events(), 1)
    assert (view.iteration, view.length_ms, view.until_ms) == (1, 99.0, 199.0)
    assert view.transfers == (
        Transfer(name="a.0", begin_ms=90.0, arrival_ms=110.0, waited_ms=10.0, used_ms=111.0),
        Transfer(name="b.0", begin_ms=60.0, arrival_ms=81.0, waited_ms=0.5, used_ms=120.5),
    )
    assert view.rows == {COMPUTE: "compute"}


def test_bars_are_clipped_and_in_order() -> None:
    bars = view_iteration(events(), 1).bars
    assert [bar.begin_ms for bar in bars] == sorted(bar.begin_ms for bar in bars)
    assert all(0 <= bar.begin_ms <= bar.end_ms <= 199 for bar in bars)
    assert not [bar for bar in bars if bar.kind == "iteration"]
    # What began in the iteration before and ends in this one is there from its beginning on.
    assert ("a.0", 8.0, 10.0) in {
        (bar.name, bar.begin_ms, bar.end_ms) for bar in bars if bar.row == RECEIVE
    }


def test_without_a_number_the_one_in_the_middle() -> None:
    assert view_iteration(events(9)).iteration == 4
    assert view_iteration(events(2)).iteration == 0


@pytest.mark.parametrize(
    ("count", "wanted", "words"),
    [
        (0, None, "an iteration and the next one; it has none"),
        (1, None, "it has none"),
        (4, 3, "iteration 3 and the next one; it has 0 to 2"),
        (4, -1, "iteration -1"),
    ],
)
def test_iterations_that_are_not_there(count: int, wanted: int | None, words: str) -> None:
    with pytest.raises(JobError, match=words):
        view_iteration(events(count), wanted)


def test_a_span_without_a_time() -> None:
    broken = events()
    broken[-1] = {"ph": "X", "name": "iteration 9", "cat": "iteration", "tid": COMPUTE}
    with pytest.raises(JobError, match="no time"):
        view_iteration(broken)


def write(folder: Path, name: str, *spans: str) -> Path:
    trace = Trace(folder / name, process=name, order=7)
    for span in spans:
        trace.span(Track.COMPUTE, "forward", span, trace.now())
        trace.count("queue", messages=1)
    trace.close()
    return folder / name


def merged(paths: list[Path]) -> list[dict[str, Any]]:
    pieces: list[str] = []
    count = merge(paths, pieces.append)
    events: list[dict[str, Any]] = json.loads("".join(pieces))
    assert len(events) == count
    return events


def test_files_come_workers_first_and_by_number(tmp_path: Path) -> None:
    names = [
        "trace_worker_0",
        "trace_worker_2",
        "trace_worker_10",
        "trace_shard_0",
        "trace_shard_11",
    ]
    for name in (*reversed(names), "trace_worker_x", "trace", "trace_shard_0.old"):
        (tmp_path / f"{name}.json").touch()
    assert [path.stem for path in trace_files(tmp_path)] == names


def test_a_folder_without_traces(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="--trace"):
        trace_files(tmp_path)


def test_processes_get_numbers_and_times_begin_at_nothing(tmp_path: Path) -> None:
    paths = [
        write(tmp_path, "trace_worker_0.json", "a"),
        write(tmp_path, "trace_shard_0.json", "b"),
    ]
    events = merged(paths)
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {0: "trace_worker_0.json", 1: "trace_shard_0.json"}
    sorting = {
        e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"
    }
    assert sorting == {0: 0, 1: 1}
    times = [event["ts"] for event in events if "ts" in event]
    assert min(times) == 0
    assert max(times) < 60e6
    assert {e["pid"] for e in events if e["name"] == "forward b"} == {1}
    # What is left out of an event in merging is its number and time alone.
    (kept,) = (event for event in events if event["name"] == "forward a")
    (original,) = (event for event in read_trace(paths[0]) if event["name"] == "forward a")
    assert {**kept, "ts": 0, "pid": 0} == {**original, "ts": 0, "pid": 0}


def test_what_a_killed_process_left_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "trace_worker_0.json", "a", "b")
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[: whole.index("forward b") + 3], encoding="utf-8")
    spans = [event["name"] for event in merged([path]) if event["ph"] == "X"]
    assert spans == ["forward a"]


@pytest.mark.parametrize("text", ["", "nonsense", "{}", '{"traceEvents": []}'])
def test_what_is_no_trace(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace_worker_0.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(JobError, match="not a trace"):
        merged([path])


def test_lines_that_are_no_events_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace_worker_0.json"
    path.write_text(
        '[\n3,\n{"ph": 4},\n{"ph": "X", "name": "a", "ts": 1, "dur": 1}\n', encoding="utf-8"
    )
    assert [event["name"] for event in merged([path])] == ["a"]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot read"):
        merged([tmp_path / "trace_worker_0.json"])
