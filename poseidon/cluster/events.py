"""The protocol between the processes of a job and their launcher: one JSON object a line.

A process prints to standard output:

    {"event": "listening", "address": "tcp://127.0.0.1:40123"}
        a shard, once it is bound; where there is none, a worker 0 that others connect to
    {"event": "listening", "address": "...", "round": 1}
        the same, of a later exchange of addresses
    {"event": "listening", "address": "...", "round": 0, "among": "workers"}
        a worker, for an exchange of addresses of all workers
    {"event": "connecting", "round": 1}
        a worker that needs the addresses of a later exchange, and has none to report
    {"event": "ready"}
        a worker that has its net and can connect
    {"event": "alive", "still_s": 0.1, "waited_s": 12.5, "read_s": 0.5,
     "sending_s": {"10.0.0.2": 3.5}, "host_busy": 0.5, "most_lead": 0}
        every two seconds and at the end, from all workers: for how long the loop has neither moved
        nor waited for others; how long it has waited in total, how long for its data, how long it
        had something to send to hosts, the busy part of its host's processors, and how many
        iterations it may be ahead of the slowest worker, or null; with a GPU also `gpu`, see
        `GpuReading` of `poseidon.observe.metrics.job_statistics`
    {"event": "alive", ..., "position": {"iterations": 6, "collections": 2, ...}}
        the same of a script's loop, with its `LoopPosition`
    {"event": "statistics", ...}
        every few seconds and at the end, from all; `poseidon.observe.metrics.job_statistics` has the fields
    {"event": "progress", "iteration": 120, "max_iter": 4000, "images": 12000, "loss": 1.5,
     "virtual_workers": 2}
        a worker; the last ones are those that it computes for, in a job of a solver
    {"event": "progress", ..., "tested": 12, "to_test": 50}
        during a test
    {"event": "progress", "iteration": 120, "in_memory": 110}
        of a script; its newest memory snapshot that this worker holds, or null
    {"event": "timed", "iterations": 12, "own_s": 3.1, "whole_s": 4.2}
        a few times a second, from all workers of a job with `--balance=auto`: the time of its
        iterations in this start, without and with waits for others
    {"event": "trained", "iteration": 100, "loss": 1.5, "rate": 0.01, "outputs": [["loss", 1.5]]}
        worker 0, at a displayed iteration
    {"event": "logged", "iteration": 100, "values": {...}}
        a worker of a script that logs: numbers by name, null where one is not finite
    {"event": "tested", "iteration": 500, "net": 0, "scores": [["accuracy", "0.7"]]}
        worker 0, at the end of a test of a net
    {"event": "snapshot", "state": "/.../snap_iter_120.solverstate", "iteration": 120, "seconds": 0.2}
        worker 0, once a snapshot is complete on disk
    {"event": "exchange_plan", "plan": "..."}
        worker 0, once `--exchange=auto` or `hybrid` has chosen; the text of `exchange_plan.json`
    {"event": "paused", "snapshot": 120, "is_part": false, "message": "", "regrouped": false}
        a process that waits for the next start, see `Paused`
    {"event": "done"}
        a worker whose work is finished and saved; with "joined": false a script that has ended
        without `distribute`
    {"event": "error", "message": "one sentence", "exit_code": 1, "peer_lost": true,
     "unreachable": false, "traceback": ""}
        see `Failed`

and reads from standard input, after its job document:

    {"do": "connect", "addresses": ["tcp://...", ...], "round": 0, "among": "job"}
    {"do": "listen", "round": 1}    a shard, for a later exchange of addresses
    {"do": "snapshot"}   {"do": "stop"}
    {"do": "pause"}                 close the exchange, keep the state, report `paused`
    {"do": "regroup"}               worker 0: all workers take a memory snapshot after the same
                                    iteration, and pause once it is complete
    {"do": "go_on", "document": {...}}
        a process that has paused: its document of the next start; a shard's has its number, too:
        "shard": 0

Law: `parse_event` validates. What it returns has the types below; anything else is free text, which
is logged and decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from poseidon.base.call_names import LoopPosition
from ps_server.json_fields import value_of


class Among(Enum):
    """The processes whose addresses are exchanged."""

    JOB = "job"
    """The shards; where there are none, all workers."""
    WORKERS = "workers"
    """All workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressRound:
    """One exchange of addresses. All workers take part in each, in the same order.

    Attributes:
        among: whose addresses are exchanged.
        number: of the exchange among these, from 0.
    """

    among: Among = Among.JOB
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A process is bound to an address, for one exchange of addresses."""

    address: str
    round: AddressRound = AddressRound()


@dataclass(frozen=True, slots=True, kw_only=True)
class Connecting:
    """A worker needs the addresses of an exchange, and has none to report."""

    round: AddressRound


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A worker has read its definitions and opened its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """A heartbeat, or an event that only the callbacks understand.

    Attributes:
        still_s: for how long the process's loop has neither moved nor waited for others; None: not
            reported.
        position: of a script's loop; None: not reported.
    """

    still_s: float | None = None
    position: LoopPosition | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A worker has finished `iteration` iterations."""

    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A snapshot or checkpoint after `iteration` iterations is complete on disk."""

    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A worker has finished its work and saved it.

    Attributes:
        joined: False for a script that has ended without `distribute`.
    """

    joined: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A process reports why it is going to end.

    Attributes:
        message: one sentence for the user.
        exit_code: what the command line exits with, 1..255.
        peer_lost: the cause is the loss of another process, whose own report counts first.
        unreachable: that process could not be connected to.
        traceback: of an exception of the user's code; empty: there was none.
        host_lost: set by the launcher: the process's host is lost.
        killed_by_user: set by the launcher: the user has killed the job on that host; `unwanted` in
            the protocol.
    """

    message: str
    exit_code: int
    peer_lost: bool
    unreachable: bool = False
    traceback: str = ""
    host_lost: bool = False
    killed_by_user: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """A process has ended its part of a start, and waits for the document of the next one.

    Attributes:
        snapshot: the iteration of the newest complete memory snapshot that it holds; None: it holds
            none.
        is_part: the snapshot is this worker's part of a module that is divided; one can continue
            from the parts of all workers of its host.
        message: why it has paused by itself, one sentence; empty: it was asked to.
        regrouped: it has paused after `regroup`, with all others and after the same iteration.
    """

    snapshot: int | None = None
    is_part: bool = False
    message: str = ""
    regrouped: bool = False


Event = Bound | Connecting | Ready | Alive | Progress | Saved | Paused | Done | Failed


def decode_line(line: bytes) -> Mapping[str, object] | None:
    """Return the JSON object with an `event` in a line of standard output, or None if there is
    none.
    """
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("event"), str):
        return None
    return value


_KINDS: dict[object, type[Event]] = {
    "listening": Bound,
    "connecting": Connecting,
    "ready": Ready,
    "alive": Alive,
    "progress": Progress,
    "snapshot": Saved,
    "done": Done,
    "paused": Paused,
}


def parse_event(fields: Mapping[str, object]) -> Event:
    """Return the typed value of an event; an unknown or incomplete one counts as a heartbeat."""
    kind = fields.get("event")
    if kind == "error":
        return _failed(fields)
    at = {"among": fields.get("among", "job"), "number": fields.get("round", 0)}
    try:
        return value_of(_KINDS.get(kind, Alive), {**fields, "round": at})
    except ValueError:
        return Alive()


def encode_command(do: str, **fields: object) -> bytes:
    """Encode a command for standard input, without the line end.

    >>> encode_command("connect", addresses=["tcp://127.0.0.1:5"])
    b'{"do": "connect", "addresses": ["tcp://127.0.0.1:5"]}'
    """
    return json.dumps({"do": do, **fields}).encode()


def _failed(fields: Mapping[str, object]) -> Failed:
    message, trace = fields.get("message"), fields.get("traceback")
    code = fields.get("exit_code")
    return Failed(
        message=message if isinstance(message, str) and message else "failed without a message",
        exit_code=code if type(code) is int and 1 <= code <= 255 else 1,
        peer_lost=fields.get("peer_lost") is True,
        unreachable=fields.get("unreachable") is True,
        traceback=trace if isinstance(trace, str) else "",
        host_lost=fields.get("host_lost") is True,
        killed_by_user=fields.get("unwanted") is True,
    )
