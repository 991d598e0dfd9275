"""The records of a job over time: what `metrics.jsonl`, TensorBoard and Prometheus are made of.

Each record is one JSON object with the time in seconds since 1970 and a kind:

    {"time": 2.0, "kind": "train", "iteration": 100, "loss": 1.5, "rate": 0.01, "outputs": {...}}

docs/metrics.md has the kinds and their fields. A number that is not finite is null; so is the last
iteration of a script that has made no step. A blob of several values has one output for each:
`probability[0]`, `probability[1]`.

Law: pure. An event that is not valid gives no record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from poseidon.metrics.job_statistics import ShardStatistics
from poseidon.metrics.progress import JobProgress
from poseidon.metrics.record import own_names, repeated

Record = Mapping[str, Any]


def train_record(event: Mapping[str, object]) -> Record | None:
    """Return the record of a `trained` event of worker 0."""
    iteration, outputs = event.get("iteration"), _outputs(event.get("outputs"))
    if not isinstance(iteration, int) or outputs is None:
        return None
    return {
        "kind": "train",
        "iteration": iteration,
        "loss": _finite(event.get("loss")),
        "rate": _finite(event.get("rate")),
        "outputs": outputs,
    }


def test_record(event: Mapping[str, object]) -> Record | None:
    """Return the record of a `tested` event of worker 0."""
    iteration, net = event.get("iteration"), event.get("net")
    outputs = _outputs(event.get("scores"))
    if not isinstance(iteration, int) or not isinstance(net, int) or outputs is None:
        return None
    return {"kind": "test", "iteration": iteration, "net": net, "outputs": outputs}


test_record.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def progress_record(progress: JobProgress) -> Record:
    """Return the record of a job's progress; the rates are iterations and images a second, 0 if
    unknown.
    """
    return {
        "kind": "progress",
        "iteration": progress.iteration,
        "max_iter": progress.max_iter,
        "loss": _finite(progress.loss),
        "rate": progress.rate,
        "images_rate": progress.images_rate,
    }


def worker_record(event: Mapping[str, object], iteration: int) -> Record | None:
    """Return the record of an `alive` event of a worker; its times but `still_s` count since its
    start.

    Args:
        iteration: the last that it has reported.
    """
    times = {name: event.get(name) for name in ("waited_s", "still_s", "read_s", "host_busy")}
    known = {name: value for name, value in times.items() if isinstance(value, int | float)}
    if "waited_s" not in known or "still_s" not in known:
        return None
    sending = seconds_by_host(event.get("sending_s"))
    later = {"read_s": 0.0, "host_busy": 0.0}  # earlier releases do not send them
    return {"kind": "worker", "iteration": iteration, **later, **known, "sending_s": sending}


def shard_record(statistics: ShardStatistics, event: Mapping[str, object]) -> Record:
    """Return the record of a shard; all but the queue and the memory count since its start.

    Args:
        event: that has brought them, with the times of its process.
    """
    names = (
        "bytes_in",
        "bytes_out",
        "messages_in",
        "updates",
        "busy_s",
        "queue",
        "longest_queue",
        "memory_bytes",
    )
    return {
        "kind": "shard",
        **{name: getattr(statistics, name) for name in names},
        "stalled_s": _finite(event.get("stalled_s")) or 0.0,
        "sending_s": seconds_by_host(event.get("sending_s")),
    }


def seconds_by_host(value: object) -> dict[str, float]:
    """Return the times of connections by the address of the other side, as a process has sent
    them; else none.
    """
    if not isinstance(value, dict):
        return {}
    return {
        str(host): float(seconds) for host, seconds in value.items() if _finite(seconds) is not None
    }


def encode_record(record: Record) -> str:
    """Return a record as one line of JSON, without the line end."""
    return json.dumps(record, allow_nan=False, separators=(",", ":"))


def _outputs(value: object) -> dict[str, float | None] | None:
    """Return the outputs of pairs of name and value; None if one is not such a pair."""
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in value
    ):
        return None
    names = [str(name) for name, _ in value]
    numbers = [_finite(number) for _, number in value]
    return dict(zip(own_names(names, repeated(names)), numbers, strict=True))


def _finite(value: object) -> float | None:
    """Return a number, also one that is given as text; None for anything else, or not finite."""
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None
