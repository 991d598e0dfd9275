"""The parts of the page as HTML: numbers, rows, marks; nothing foreign gets through."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from poseidon.observe.dashboard.rendering import fill, job_options, job_parts, last_values, number
from poseidon.observe.dashboard.view import JobView
from poseidon.observe.metrics.job_records import decode_record


@pytest.mark.parametrize(
    ("value", "digits", "expected"),
    [
        (0.0049, 4, "0.0049"),
        (0.00001, 4, "1e-5"),
        (-0.000012345, 4, "-1.234e-5"),
        (0, 4, "0"),
        (427, 4, "427"),
        (12345.6, 4, "12,350"),
        (10_000_000, 9, "10,000,000"),
        (0.98765432, 4, "0.9877"),
        (float("nan"), 4, "nan"),
        (None, 4, "–"),
    ],
)
def test_numbers_have_some_significant_digits(
    value: float | None, digits: int, expected: str
) -> None:
    assert number(value, digits) == expected


def process(kind: str, time: float, index: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "time": time,
        "index": index,
        "host": f"node{index}",
        "client": index,
        **more,
    }


def parts(*records: dict[str, Any], **more: Any) -> dict[str, str]:
    view = JobView()
    for record in records:
        known = decode_record(json.dumps(record).encode())
        assert known is not None
        view.add(known)
    settings = {"name": "job-1", "tensors": (), "has_trace": False, "running": True, **more}
    running = settings.pop("running")
    return job_parts(summary=view.summary(110.0, running=running), **settings)


START = {"kind": "start", "time": 100.0, "job": "job-1"}


def test_what_a_job_has_not_reported_is_not_shown() -> None:
    found = parts(START)
    assert found["state"] == '<span class="state running">running</span>'
    assert found["bottleneck"] == "Not enough has been measured yet."
    assert re.findall("<dt>(.*?)</dt>", found["facts"]) == ["Iteration", "Running for"]
    for part in ("bar", "worker-rows", "shard-rows", "tensor-rows", "timeline"):
        assert found[part] == "", "the page hides what is empty"
    assert last_values({}) == last_values({"loss": []}) == ""
    assert "</time> the job was started</li>" in found["events"]


def test_a_job_that_trains_is_shown_with_its_slowest_worker() -> None:
    progress = {"iteration": 40, "max_iter": 80, "loss": 1.25, "rate": 2.0, "images_rate": 200.0}
    busy = {"read_s": 0.0, "sending_s": {}, "host_busy": 0.2}
    records = [START, {"kind": "progress", "time": 108.0, **progress}]
    for time, iteration in ((104.0, 20), (108.0, 40)):
        for rank, waited_s in enumerate((3.0, 3.0, 0.0)):
            waited = waited_s * (time - 100.0) / 4.0
            records.append(
                process("worker", time, rank, iteration=iteration, waited_s=waited, **busy)
            )
        records.append(
            process(
                "shard",
                time,
                0,
                busy_s=time / 8,
                queue=1,
                bytes_in=2e6 * time,
                bytes_out=0,
                sending_s={},
            )
        )
    tensor = {
        "name": "fc.0",
        "scheme": "ps",
        "bytes_out": 658.0,
        "bytes_in": 1.5e6,
        "waited_s": 0.00426,
    }
    found = parts(*records, tensors=[{**tensor, "hidden_s": None}], has_trace=True)
    assert "<dt>Iteration</dt><dd>40 of 80</dd>" in found["facts"]
    assert "<dt>Loss</dt><dd>1.25</dd>" in found["facts"]
    assert "<dt>Time left</dt><dd>0:00:20</dd>" in found["facts"]
    assert 'value="0.5000"' in found["bar"]
    assert found["bottleneck"].startswith("Worker 2 on node2 is the limit")
    rows = found["worker-rows"].split("</tr>")
    assert rows[2].startswith("<tr class=marked><td>worker 2")
    bar = '<span class="part" style="--part: 75%" aria-hidden="true"></span>75 %'
    assert f"<td>{bar}</td>" in rows[0]
    assert found["shard-rows"].startswith("<tr><td>shard 0</td><td>node0</td>")
    assert "<td>1</td><td>2 MB/s</td><td>0 B/s</td></tr>" in found["shard-rows"]
    cells = ("fc.0", "ps", "658 B", "1.5 MB", "4.26 ms", "–")
    assert found["tensor-rows"] == f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    assert 'src="api/jobs/job-1/timeline"' in found["timeline"]


def test_what_is_foreign_is_text() -> None:
    evil = "<script>alert('&')</script>"
    records = [
        START,
        process(
            "worker", 104.0, 0, iteration=1, waited_s=0.0, read_s=0.0, sending_s={}, host_busy=0.1
        ),
        process("shard", 104.0, 0, busy_s=0, queue=0, bytes_in=0, bytes_out=0, sending_s={}),
        {"kind": "snapshot", "time": 105.0, "iteration": 1, "path": evil},
        {"kind": "end", "time": 106.0, "iteration": 1, "outcome": evil},
    ]
    for record in records[1:3]:
        record["host"] = evil
    tensor = {
        "name": evil,
        "scheme": evil,
        "bytes_out": 1,
        "bytes_in": 1,
        "waited_s": 0,
        "hidden_s": 0,
    }
    found = parts(*records, name=evil, tensors=[tensor], has_trace=True)
    pieces = [
        *found.values(),
        last_values({evil: [(1, 2.0)]}),
        job_options([{"name": evil, "state": evil}], evil),
    ]
    page = fill(
        "".join(f"{{{{{name}}}}}" for name in ("title", "name", "search", "log")),
        {"title": evil, "log": evil},
    )
    assert all("<script" not in piece for piece in [*pieces, page])
    assert page.count("&lt;script&gt;") == 2


def test_the_template_is_filled_once() -> None:
    """What a part contains is not taken for a place of another one."""
    assert (
        fill("<b>{{state}}</b>{{log}}{{unknown}}", {"state": "{{log}}", "log": "x"})
        == "<b>{{log}}</b>x"
    )


def test_curves_are_their_last_values() -> None:
    found = last_values({"loss": [(1, 2.0), (2, 0.123456)], "empty": []})
    assert found == '<dl id="last-values"><div><dt>loss</dt><dd>0.1235</dd></div></dl>'
