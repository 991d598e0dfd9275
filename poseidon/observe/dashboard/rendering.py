"""The parts of the page as HTML: the state of a job, its tables, its events.

The page carries them when it is loaded, and the stream sends those that have changed. So a browser
without JavaScript, or one that the stream does not reach, shows the job too.

Law: pure. All text is escaped: names of jobs, hosts and tensors are foreign.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any
from urllib.parse import quote

NONE = "–"
TEXTS = frozenset({"title", "name", "search", "log"})
"""The parts of the template that are plain text."""
_UNITS = ("B", "kB", "MB", "GB")


def job_parts(
    name: str, summary: Mapping[str, Any], tensors: Sequence[Mapping[str, Any]], *, has_trace: bool
) -> dict[str, str]:
    """Return what the page shows of a job beside its curves and logs: HTML by the element's id.

    Args:
        name: of the job in addresses.
        summary: of `JobView.summary`.
        tensors: of `JobFolder.tensors`.
    """
    bottleneck = summary["bottleneck"]
    state = escape(summary["state"])
    done = summary["iteration"] / summary["max_iter"] if summary["max_iter"] else 0
    bar = f'<progress max="1" value="{done:.4f}" aria-label="Iterations done"></progress>'
    return {
        "state": f'<span class="state {state.replace(" ", "-")}">{state}</span>',
        "bottleneck": escape(bottleneck["sentence"]),
        "advice": escape(bottleneck["advice"]),
        "facts": "".join(
            f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in _facts(summary)
        ),
        "bar": bar if summary["max_iter"] else "",
        "worker-rows": _workers(summary["workers"], bottleneck["where"]),
        "shard-rows": _shards(summary["shards"], bottleneck["where"]),
        "tensor-rows": _tensors(tensors),
        "timeline": _timeline(name) if has_trace else "",
        "events": "".join(_event(event) for event in reversed(summary["events"])),
    }


def last_values(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return a list of the curves' last values, for a page that draws no curves; empty without
    curves.

    Args:
        curves: points (iteration, value) by name.
    """
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{number(points[-1][1])}</dd></div>"
        for name, points in curves.items()
        if points
    )
    return f'<dl id="last-values">{rows}</dl>' if rows else ""


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Return a page: a template with parts in place of `{{id}}`; an id without a part becomes
    empty.

    Args:
        parts: HTML by id. The parts of `TEXTS` are text, which is escaped here.
    """

    def part(found: re.Match[str]) -> str:
        text = parts.get(found[1], "")
        return escape(text) if found[1] in TEXTS else text

    return re.sub(r"\{\{([a-z-]+)\}\}", part, template)


def job_options(rows: Sequence[Mapping[str, Any]], chosen: str) -> str:
    """Return the options of the list of jobs.

    Args:
        rows: of the jobs, with `name` and `state`.
    """
    return "".join(
        f'<option value="{escape(row["name"])}"{" selected" if row["name"] == chosen else ""}>'
        f"{escape(row['name'])} ({escape(row['state'])})</option>"
        for row in rows
    )


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with some significant digits: `0.4567`, `12,350`, `1e-5`.

    Args:
        value: None: it is not known.
        digits: at least 1.
    """
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    if value != 0 and abs(value) < 1e-4:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}"
    text = f"{float(f'{value:.{digits}g}'):,.{digits + 4}f}"
    return text.rstrip("0").rstrip(".")


def _facts(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield what is known, each with its name."""
    of = f" of {number(summary['max_iter'], 9)}" if summary["max_iter"] else ""
    yield "Iteration", number(summary["iteration"], 9) + of
    known = {
        "Loss": number(summary["loss"]),
        "Iterations a second": number(summary["rate"] or None, 3),
        "Images a second": number(summary["images_rate"] or None),
        "Time left": _duration(summary["eta_s"]),
        "Running for": _duration(summary["updated"] - summary["started"]),
        "Workers": str(len(summary["workers"]) or NONE),
        "Shards": str(len(summary["shards"]) or NONE),
    }
    yield from ((name, value) for name, value in known.items() if value != NONE)


def _workers(workers: Sequence[Mapping[str, Any]], limit: str) -> str:
    rows = []
    for worker in workers:
        label = f"worker {worker['rank']}"
        marks = [
            *(["slowest"] if label == limit else []),
            *(["silent"] if worker["silent"] else []),
        ]
        kind = (
            "silent" if worker["silent"] else "marked" if limit in (label, worker["host"]) else ""
        )
        known = worker["waited"] is not None
        cells = [
            f"{label} ({', '.join(marks)})" if marks else label,
            escape(worker["host"]),
            number(worker["iteration"], 9),
            f"+{worker['lead']}",
            _part(max(0.0, 1.0 - worker["waited"] - worker["read"]) if known else None),
            _part(worker["waited"]),
            _part(worker["read"]),
            _milliseconds(worker["own_s"]),
            escape(", ".join(worker["gpu"])) or NONE,
        ]
        rows.append(_row(cells, kind))
    return "".join(rows)


def _shards(shards: Sequence[Mapping[str, Any]], limit: str) -> str:
    rows = []
    for shard in shards:
        label = f"shard {shard['index']}"
        cells = [
            label,
            escape(shard["host"]),
            _part(shard["busy"]),
            str(shard["queue"]),
            _rate(shard["in_per_s"]),
            _rate(shard["out_per_s"]),
        ]
        rows.append(_row(cells, "marked" if limit in (label, shard["host"]) else ""))
    return "".join(rows)


def _tensors(tensors: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        _row(
            [
                escape(tensor["name"]),
                escape(tensor["scheme"]),
                _bytes(tensor["bytes_out"]),
                _bytes(tensor["bytes_in"]),
                _milliseconds(tensor["waited_s"]),
                _milliseconds(tensor["hidden_s"]),
            ]
        )
        for tensor in tensors
    ]
    return "".join(rows)


def _row(cells: Sequence[str], kind: str = "") -> str:
    return f"<tr{f' class={kind}' if kind else ''}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _timeline(name: str) -> str:
    address = f"api/jobs/{quote(name, safe='')}/timeline"
    picture = f'<img src="{address}" alt="Timeline of one iteration of worker 0">'
    return f'<h2>One iteration</h2><div class="wide">{picture}</div>'


def _event(event: Mapping[str, Any]) -> str:
    time = datetime.fromtimestamp(event["time"])
    return f'<li><time datetime="{time:%FT%T}">{time:%T}</time> {escape(event["text"])}</li>'


def _part(part: float | None) -> str:
    """Return a part of the time, as a bar and in percent."""
    if part is None:
        return NONE
    text = f"{100 * part:.0f}"
    return f'<span class="part" style="--part: {text}%" aria-hidden="true"></span>{text} %'


def _milliseconds(seconds: float | None) -> str:
    return NONE if seconds is None else f"{number(1e3 * seconds, 3)} ms"


def _rate(bytes_per_s: float | None) -> str:
    return NONE if bytes_per_s is None else f"{_bytes(bytes_per_s)}/s"


def _bytes(value: float | None) -> str:
    if value is None:
        return NONE
    power = 0
    while value >= 1000 and power < len(_UNITS) - 1:
        value, power = value / 1000, power + 1
    return f"{number(value, 3)} {_UNITS[power]}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
