"""Observability of a real job: traces of all its processes, and statistics that agree with the
formulas.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from poseidon.cli.main import main
from poseidon.exchange.options import ExchangeKind
from poseidon.observe.metrics.job_statistics import JobStatistics, read_statistics
from poseidon.observe.metrics.trace_iteration import merge, trace_files
from ps_server.trace import Track
from tests.support.training import Job, run, weights, write_definitions
from tests.support.training_processes import machinefile, make_data, poseidon_here

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

ITERATIONS = 12
BATCH = 5
SIZES = {
    "conv.0": 4 * 3 * 3 * 3,
    "conv.1": 4,
    "norm.0": 4,
    "norm.1": 4,
    "norm.2": 1,
    "scale.0": 4,
    "scale.1": 4,
    "ip0.0": 10 * 16,
    "ip0.1": 10,
    "ip.0": 10 * 16,
    "ip.1": 10,
}
LEARNED = [name for name in SIZES if not name.startswith("norm")]
TABLES = ("conv.0 and 6 more", "conv.1", "norm.0 and 2 more")
"""Pools of small tensors: the bias of the convolution has a rate of its own, statistics have no
rule.
"""
HEAD_BYTES = 48
"""Longest header of a message of this job."""

Event = dict[str, Any]


def train(folder: Path, shards: int, *flags: str) -> Path:
    """A job of two clients; its output folder."""
    output = folder / f"out{len(list(folder.iterdir()))}"
    solver = write_definitions(folder, batch=BATCH, norm=True, extra=f"max_iter: {ITERATIONS}")
    hosts = machinefile(folder, 2, shards)
    result = poseidon_here(
        folder, "train", f"--solver={solver}", f"--hostfile={hosts}", f"--output={output}", *flags
    )
    assert result.returncode == 0, result.stderr
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing")
    make_data(made)
    return made


@pytest.fixture(scope="module")
def traced(folder: Path) -> Path:
    return train(folder, 2, "--exchange=ps", "--trace")


def events(path: Path) -> list[Event]:
    found: list[Event] = json.loads(path.read_text(encoding="utf-8"))
    return found


def names(path: Path, kind: str, *tracks: Track) -> dict[str, int]:
    """Return how often each name of a kind occurs, in some tracks or in all."""
    rows = {track.value for track in tracks or Track}
    counts: dict[str, int] = defaultdict(int)
    for event in events(path):
        if event["ph"] == "X" and event["cat"] == kind and event["tid"] in rows:
            counts[event["name"].removeprefix(f"{kind} ")] += 1
    return counts


@pytest.mark.parametrize("rank", [0, 1])
def test_a_workers_trace_shows_every_layer(traced: Path, rank: int) -> None:
    path = traced / f"trace_worker_{rank}.json"
    forward, backward = names(path, "forward"), names(path, "backward")
    for layer in ("conv", "pool", "relu", "norm", "scale", "back", "ip0", "ip", "loss"):
        # Caffe shows the loss of one more pass at the end.
        assert forward[layer] == ITERATIONS + 1, layer
        assert backward[layer] == ITERATIONS, layer
    assert names(path, "iteration") == {str(i): 1 for i in range(ITERATIONS)}
    waits = names(path, "wait")
    assert {name: waits[name] for name in SIZES} == dict.fromkeys(SIZES, ITERATIONS + 1)
    begun = names(path, "begin")
    assert {name: begun[name] for name in LEARNED} == dict.fromkeys(LEARNED, ITERATIONS)
    for kind in ("send", "receive"):
        seen = names(path, kind)
        assert all(seen[name] >= ITERATIONS for name in TABLES), kind


def test_a_shards_trace_shows_its_tables_and_its_queue(traced: Path) -> None:
    both: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for index in (0, 1):
        path = traced / f"trace_shard_{index}.json"
        for kind in ("receive", "sum", "apply", "send"):
            for name, count in names(path, kind).items():
                both[kind][name] += count
        queue = [event["args"]["messages"] for event in events(path) if event["ph"] == "C"]
        assert max(queue) >= 1
        assert min(queue) == 0
    for name in TABLES:
        assert both["apply"][name] == ITERATIONS
        # Of the two pushes of each iteration one completes the sum; first values are received too,
        # by rank 0 alone.
        assert both["sum"][name] >= ITERATIONS
        assert both["receive"][name] >= 2 * ITERATIONS
        assert both["send"][name] >= 2 * ITERATIONS


def test_the_whole_job_in_one_file_is_nested_and_lies_on_one_axis(traced: Path) -> None:
    pieces: list[str] = []
    merge(trace_files(traced), pieces.append)
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in json.loads("".join(pieces)):
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    assert {pid for pid, _ in rows} == {0, 1, 2, 3}
    for row in rows.values():
        check_nested(row)
    check_causes(rows[0, 1], rows[1, 1])
    check_causes(rows[1, 1], rows[0, 1])
    inside = {
        (outer["name"], inner["name"])
        for outer in rows[0, 1]
        for inner in rows[0, 1]
        if outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    }
    assert ("forward ip", "wait ip.0") in inside
    assert ("backward ip", "begin ip.0") in inside
    assert {(f"iteration {i}", "backward conv") for i in range(ITERATIONS)} <= inside


def check_causes(one: list[Event], other: list[Event]) -> None:
    """Check that at staleness 0 a worker waits for a tensor until every other has begun its
    gradient.
    """
    waits = [e["ts"] + e["dur"] for e in one if e["name"] == "wait conv.0"]
    begins = [e["ts"] for e in other if e["name"] == "begin conv.0"]
    for begun, waited in zip(sorted(begins), sorted(waits)[1:], strict=False):
        assert begun < waited


def check_nested(row: list[Event]) -> None:
    """Check that no two spans of a track cross."""
    open_ends: list[float] = []
    for event in sorted(row, key=lambda e: (e["ts"], -e["dur"])):
        while open_ends and open_ends[-1] <= event["ts"]:
            open_ends.pop()
        end = event["ts"] + event["dur"]
        assert not open_ends or end <= open_ends[-1], event
        open_ends.append(end)
    assert all(a >= b for a, b in pairwise(open_ends))


def test_bytes_are_those_of_the_formula(traced: Path) -> None:
    statistics = read_statistics(traced / "statistics.json")
    for worker in statistics.workers.values():
        assert worker.iterations == ITERATIONS
        assert {tensor.name for tensor in worker.tensors} == set(SIZES)
        for tensor in worker.tensors:
            assert tensor.scheme == "ps"
            for moved in (tensor.bytes_out, tensor.bytes_in):
                assert moved is not None
                heads = moved - ITERATIONS * 4 * SIZES[tensor.name]
                assert 0 <= heads <= ITERATIONS * HEAD_BYTES, tensor.name
            assert tensor.waited_s >= 0
            assert tensor.hidden_s is not None
    check_shards(statistics)
    assert statistics.shards.keys() == {0, 1}
    assert sum(shard.updates for shard in statistics.shards.values()) == ITERATIONS * len(TABLES)


def check_shards(statistics: JobStatistics) -> None:
    """Check that shards have received the bytes that workers have sent."""
    sent = sum(
        w.other_bytes_out + sum(t.bytes_out or 0 for t in w.tensors)
        for w in statistics.workers.values()
    )
    received = sum(shard.bytes_in for shard in statistics.shards.values())
    assert 0 <= received - sent <= 4096  # goodbyes, and what was on its way when the last was told


def test_the_command_prints_the_table_and_the_logs_do_not(
    traced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for log in traced.glob("worker_*.log"):
        assert "waited ms" not in log.read_text(encoding="utf-8")
    assert main(["stats", str(traced)]) == 0
    printed = capsys.readouterr().out
    assert "waited ms" in printed
    assert all(name in printed for name in SIZES)
    assert f"2 workers, {ITERATIONS} iterations, 2 shards" in printed


def test_observation_changes_no_bit_and_factors_are_counted_and_traced(folder: Path) -> None:
    """What a job counts that is not traced, `test_exchanges.py` sees."""
    solver = write_definitions(folder, batch=BATCH, norm=True, extra=f"max_iter: {ITERATIONS}")
    run(solver, Job(workers=2, shards=1, kind=ExchangeKind.FACTORS))
    untraced = weights(folder, ITERATIONS)
    traced = train(folder, 1, "--exchange=svb", "--trace")
    assert all((a == b).all() for a, b in zip(untraced, weights(folder, ITERATIONS), strict=True))
    for worker in read_statistics(traced / "statistics.json").workers.values():
        factors = {t.name: (t.bytes_out, t.bytes_in) for t in worker.tensors if t.scheme == "svb"}
        moved = ITERATIONS * 4 * BATCH * (10 + 16)
        assert factors == {"ip0.0": (moved, moved), "ip.0": (moved, moved)}
    path = traced / "trace_worker_0.json"
    for kind in ("send", "receive", "apply", "wait", "begin"):
        seen = names(path, kind, Track.COMPUTE, Track.FACTORS, Track.REBUILD)
        assert seen["ip.0"] == ITERATIONS + (kind == "wait"), kind  # in that pass, too
