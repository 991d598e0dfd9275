"""The records of a job over time: what `metrics.jsonl`, TensorBoard and Prometheus are made of.

Each record is one JSON object with the time in seconds since 1970 and a kind:

    {"time": 2.0, "kind": "train", "iteration": 100, "loss": 1.5, "rate": 0.01, "outputs": {...}}

docs/metrics.md has the kinds and their fields. A number that is not finite is null; so is the last
iteration of a script that has made no step. A blob of several values has one output for each:
`probability[0]`, `probability[1]`.

Law: pure. An event that is not valid gives no record. A line of a file is read with the types and
ranges of all its fields checked: it may be cut off, or written by another user.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, TypeGuard

from poseidon.observe.metrics.job_statistics import GpuReading, parsed
from poseidon.observe.metrics.progress import JobProgress
from poseidon.observe.metrics.record import own_names, repeated
from ps_server.statistics import ShardStatistics

Record = Mapping[str, Any]


def train_record(event: Mapping[str, object]) -> Record | None:
    """Return the record of a `trained` event of worker 0."""
    iteration, outputs = event.get("iteration"), _outputs(event.get("outputs"))
    if not isinstance(iteration, int) or outputs is None:
        return None
    return {
        "kind": "train",
        "iteration": iteration,
        "loss": finite(event.get("loss")),
        "rate": finite(event.get("rate")),
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
        "loss": finite(progress.loss),
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
    later = {"read_s": 0.0, "host_busy": 0.0}  # earlier releases do not send them
    sending, most = seconds_by_host(event.get("sending_s")), event.get("most_lead")
    reading = parsed(GpuReading, event.get("gpu")) or GpuReading()
    gpu = {n: v for n, v in asdict(reading).items() if v is not None}
    return {
        "kind": "worker",
        "iteration": iteration,
        **later,
        **known,
        "sending_s": sending,
        "most_lead": most if isinstance(most, int) else None,
        **({"gpu": gpu} if gpu else {}),
    }


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
        "stalled_s": finite(event.get("stalled_s")) or 0.0,
        "sending_s": seconds_by_host(event.get("sending_s")),
    }


def seconds_by_host(value: object) -> dict[str, float]:
    """Return the times of connections by the address of the other side, as a process has sent
    them; else none.
    """
    if not isinstance(value, dict):
        return {}
    return {
        str(host): float(seconds) for host, seconds in value.items() if finite(seconds) is not None
    }


def last_values(records: Iterable[Record]) -> dict[str, tuple[int, float | None]]:
    """Return the last value of each curve with its iteration, by name: what a script has logged,
    `train loss`, `test 0 accuracy`.

    Args:
        records: of `metrics.jsonl`, in its order.
    """
    found: dict[str, tuple[int, float | None]] = {}
    of_script = False
    for record in records:
        if record["kind"] == "start":
            of_script = record["script"]
        elif record["kind"] in ("train", "test"):
            prefix = f"test {record['net']} " if "net" in record else "" if of_script else "train "
            for name, value in record["outputs"].items():
                found[prefix + name] = record["iteration"], value
    return found


def encode_record(record: Record) -> str:
    """Return a record as one line of JSON, without the line end."""
    return json.dumps(record, allow_nan=False, separators=(",", ":"))


def decode_record(line: bytes) -> Record | None:
    """Return the record of a line of `metrics.jsonl`, with the fields that docs/metrics.md has for
    its kind; None if the line is not such a record.
    """
    if len(line) > LONGEST_LINE:
        return None
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or not isinstance(kind := given.get("kind"), str):
        return None
    time_s, fields = given.get("time"), _FIELDS.get(kind)
    if fields is None or not _is_amount(time_s) or time_s > LATEST_S:
        return None
    record = {"kind": kind, "time": round(float(time_s), 3)}
    for name, (check, default) in fields.items():
        value = given.get(name, default)
        if not check(value):
            return None
        record[name] = value
    return record


LONGEST_LINE = 1 << 20
LATEST_S = 1e11
"""In the year 5138, which every calendar has."""
_LONGEST_TEXT = 4096
_LARGEST_COUNT = 2**53
_LARGEST_VALUE = 1e300
"""Differences and quotients of such values are finite."""


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_amount(value)


def _is_amount(value: object) -> TypeGuard[float]:
    return _is_number(value) and 0 <= value <= _LARGEST_COUNT


def _is_rate(value: object) -> bool:
    return _is_amount(value) and (value == 0 or value >= 1 / _LARGEST_COUNT)


def _is_value(value: object) -> bool:
    return value is None or (_is_number(value) and abs(value) <= _LARGEST_VALUE)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT


def _is_by_name(check: Callable[[object], bool]) -> Callable[[object], bool]:
    def checked(value: object) -> bool:
        if not isinstance(value, dict):
            return False
        return all(_is_text(name) and check(part) for name, part in value.items())

    return checked


_REQUIRED = object()
"""A default that no check accepts."""
_ITERATION = {"iteration": (_is_count, _REQUIRED)}
_PROCESS = {
    "index": (_is_count, _REQUIRED),
    "client": (_is_count, 0),
    "host": (_is_text, ""),
    "sending_s": (_is_by_name(_is_amount), {}),
}
_FIELDS: Mapping[str, Mapping[str, tuple[Callable[[object], bool], object]]] = {
    "start": {
        "job": (_is_text, _REQUIRED),
        "addresses": (_is_by_name(_is_text), {}),
        "script": (lambda value: isinstance(value, bool), False),
    },
    "train": {
        **_ITERATION,
        # of a script that does not log them
        **dict.fromkeys(("loss", "rate"), (_is_value, None)),
        "outputs": (_is_by_name(_is_value), _REQUIRED),
    },
    "test": {
        **_ITERATION,
        "net": (_is_count, _REQUIRED),
        "outputs": (_is_by_name(_is_value), _REQUIRED),
    },
    "progress": {
        **_ITERATION,
        "max_iter": (_is_count, 0),
        "loss": (_is_value, None),
        "rate": (_is_rate, 0.0),
        "images_rate": (_is_amount, 0.0),
    },
    "worker": {
        **_PROCESS,
        **_ITERATION,
        # earlier releases do not send the last three
        **dict.fromkeys(("waited_s", "read_s", "host_busy"), (_is_amount, 0.0)),
        "most_lead": (lambda value: value is None or _is_count(value), None),
        "gpu": (_is_by_name(_is_amount), {}),
    },
    "shard": {
        **_PROCESS,
        **dict.fromkeys(("busy_s", "stalled_s", "bytes_in", "bytes_out"), (_is_amount, 0)),
        "queue": (_is_count, 0),
    },
    "snapshot": {**_ITERATION, "path": (_is_text, _REQUIRED)},
    "end": {
        "outcome": (_is_text, _REQUIRED),
        "iteration": (lambda value: value is None or _is_count(value), None),
    },
}
"""For each kind its fields that are read, with a check of the value, and a value for a field that
is missing.
"""


def _outputs(value: object) -> dict[str, float | None] | None:
    """Return the outputs of pairs of name and value; None if one is not such a pair."""
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in value
    ):
        return None
    names = [str(name) for name, _ in value]
    numbers = [finite(number) for _, number in value]
    return dict(zip(own_names(names, repeated(names)), numbers, strict=True))


def finite(value: object) -> float | None:
    """Return a number that a record can have, also one that is given as text; None for anything
    else.
    """
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if abs(number) <= _LARGEST_VALUE else None
