"""The lines that the processes of a job and their launcher exchange: one JSON object a line.

A process says on standard output:
    {"event": "listening", "address": "tcp://127.0.0.1:40123"}      a shard, once it is bound
    {"event": "ready"}                                              a worker that has its net and can connect
    {"event": "alive", "still_s": 0.1, "waited_s": 12.5}            every two seconds, from all workers: for how long
                                                                    the loop has neither moved nor waited for others,
                                                                    and how long it has waited in all;
    {"event": "alive", ..., "steps": 6, "meetings": 2, "meeting": "mean"}
                                                                    of a script's loop also how far it has come
    {"event": "statistics", ...}                                    every few seconds and at the end, from all;
                                                                    `poseidon.metrics.job_statistics` has the fields
    {"event": "progress", "iteration": 120, "max_iter": 4000, "images": 12000, "loss": 1.5}
    {"event": "progress", ..., "tested": 12, "to_test": 50}         during a test
    {"event": "tested", "iteration": 500, "net": 0, "scores": [["accuracy", "0.7"], ["loss", "0.9"]]}
                                                                    worker 0, at the end of a test of a net
    {"event": "snapshot", "state": "/.../snap_iter_120.solverstate", "iteration": 120, "seconds": 0.2}
                                                                    worker 0, once a snapshot is whole on disk
    {"event": "done"}                                               a worker whose work is finished and saved
    {"event": "error", "message": "one sentence", "exit_code": 1, "peer_lost": true}
and hears on standard input, after its job document:
    {"do": "connect", "shards": ["tcp://...", ...]}   {"do": "snapshot"}   {"do": "stop"}

Law: `parse_event` is the border. What comes out has the types below; anything else is free text, which is
logged and decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A shard is bound to an address."""

    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A worker has read its definitions and opened its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How far a script's loop has come.

    Attributes:
        steps: finished.
        meetings: calls in which it waits for all others, begun.
        meeting: the one that it waits in; empty: none.
    """

    steps: int
    meetings: int
    meeting: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """A heartbeat, or an event that only the callbacks understand.

    Attributes:
        still_s: for how long the process's loop has neither moved nor waited for others; None: it does not say.
        place: how far it has come; None: it does not say.
    """

    still_s: float | None = None
    place: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A worker has finished `iteration` iterations."""

    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A worker has finished, and saved what it had to save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A process says why it is going to end.

    Attributes:
        message: one sentence for the user.
        exit_code: what the command line exits with, 1..255.
        peer_lost: the cause is that another process went away; that one's own story comes first.
        host_lost: the launcher's own word: the process's host cannot be reached any more.
        unwanted: the launcher's own word: somebody has ended the job on that host, and does not want it back.
    """

    message: str
    exit_code: int
    peer_lost: bool
    host_lost: bool = False
    unwanted: bool = False


Event = Listening | Ready | Alive | Progress | Done | Failed


def decode_line(line: bytes) -> Mapping[str, object] | None:
    """The JSON object with an `event` that a line of standard output holds, or None if it holds none."""
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("event"), str):
        return None
    return value


def parse_event(fields: Mapping[str, object]) -> Event:
    """The typed value of an event; an unknown or incomplete one counts as a sign of life."""
    kind = fields.get("event")
    if kind == "listening" and isinstance(address := fields.get("address"), str):
        return Listening(address=address)
    if kind == "ready":
        return Ready()
    if kind == "progress" and (iteration := _whole_number(fields.get("iteration"))) is not None:
        return Progress(iteration=iteration)
    if kind == "done":
        return Done()
    if kind == "error":
        return _failed(fields)
    if kind != "alive":
        return Alive()
    still_s = fields.get("still_s")
    return Alive(still_s=float(still_s) if isinstance(still_s, int | float) else None, place=_place(fields))


def encode_command(do: str, **fields: object) -> bytes:
    """One command for standard input, without the line end.

    >>> encode_command("connect", shards=["tcp://127.0.0.1:5"])
    b'{"do": "connect", "shards": ["tcp://127.0.0.1:5"]}'
    """
    return json.dumps({"do": do, **fields}).encode()


def _place(fields: Mapping[str, object]) -> Place | None:
    steps, meetings = _whole_number(fields.get("steps")), _whole_number(fields.get("meetings"))
    meeting = fields.get("meeting")
    if steps is None or meetings is None or not isinstance(meeting, str):
        return None
    return Place(steps=steps, meetings=meetings, meeting=meeting)


def _failed(fields: Mapping[str, object]) -> Failed:
    message = fields.get("message")
    code = _whole_number(fields.get("exit_code"))
    return Failed(
        message=message if isinstance(message, str) and message else "failed without saying why",
        exit_code=code if code is not None and 1 <= code <= 255 else 1,
        peer_lost=fields.get("peer_lost") is True,
        host_lost=fields.get("host_lost") is True,
        unwanted=fields.get("unwanted") is True,
    )


def _whole_number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
