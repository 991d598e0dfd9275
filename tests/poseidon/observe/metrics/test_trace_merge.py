from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from poseidon.errors import JobError
from poseidon.observe.metrics.trace_merge import merge, read_trace, trace_files
from ps_server.trace import Trace, Track


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
