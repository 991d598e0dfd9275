"""What a worker tells its launcher of its progress, and the table at the start of a job."""

from __future__ import annotations

import io
import json

from poseidon.caffe.solver.display import ScoreReporter, net_table
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.observe.metrics.record import TestRecord, TrainRecord
from ps_server import StoreSpec, TableSpec
from tests.support.nets import build, inputs, layer


def test_the_launcher_hears_of_the_last_displayed_iteration() -> None:
    """Those that follow another one too soon are left out, unless a test or the end comes next."""
    outlet = io.StringIO()
    reporter = ScoreReporter(LauncherConnection(io.StringIO(), outlet).send)
    for iteration in (0, 1, 2, 3):
        reporter.on_train(
            TrainRecord(iteration=iteration, loss=0.5, elapsed_s=1.0, outputs=(), rate=0.1)
        )
        if iteration == 2:
            reporter.on_test(TestRecord(iteration=2, net=0, elapsed_s=1.0, outputs=()))
    reporter.close()
    reporter.close()
    sent = [json.loads(line) for line in outlet.getvalue().splitlines()]
    assert [(line["event"], line["iteration"]) for line in sent] == [
        ("trained", 0), ("trained", 2), ("tested", 2), ("trained", 3),
    ]  # fmt: skip


NET = inputs(x=(4, 6)) + layer(
    "InnerProduct", "x", "y", "inner_product_param { num_output: 3 }", name="ip"
)


def test_alone() -> None:
    lines = net_table(build(NET), [["ip.0"], ["ip.1"]], None)
    assert lines[0].split() == ["layer", "type", "top", "parameters", "bytes", "on"]
    assert lines[2].split() == ["ip", "InnerProduct", "4x3", "3x6", "3", "84", "here"]
    assert lines[-1].split() == ["total", "21", "values", "84"]


def test_with_shards_each_layer_says_where_it_lives() -> None:
    tables = (TableSpec(name="ip.0", size=18, rows=6), TableSpec(name="ip.1", size=3))
    lines = net_table(
        build(NET), [["ip.0"], ["ip.1"]], StoreSpec(workers=2, shards=3, tables=tables)
    )
    assert lines[2].endswith("shard 0-2")


def test_tensors_of_one_table_live_together() -> None:
    tables = (TableSpec(name="ip.0 and 1 more", size=8, rows=1),)
    (line,) = [
        line
        for line in net_table(
            build(NET), [["ip.0", "ip.1"]], StoreSpec(workers=2, shards=3, tables=tables)
        )
        if line.startswith("ip ")
    ]
    assert line.endswith("shard 0")
