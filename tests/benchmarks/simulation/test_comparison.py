"""Results of `cluster.py --json` as scenarios, with the nets, hosts, links and ways that were
measured.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulation.comparison import (
    UNSHAPED_BITS_PER_S,
    Case,
    ComparisonError,
    cases,
    choices,
)
from benchmarks.testbed.shapes import layers_of
from poseidon.observe.plan.scenario import PlannedExchange, WireCodec
from poseidon.observe.plan.shapes import MIB, Machine


def machine_of(hosts: int, rate_mbit: float | None) -> Machine:
    return Machine(cores=8 / hosts, goodput=0.9 if rate_mbit else 1.0)


def read(table: dict[str, Any]) -> list[Case]:
    return cases(table, machine_of, net="googlenet", batch=32)


def speed(title: str, *jobs: str, rate: float | None = 250.0) -> dict[str, Any]:
    facts = [{"job": job, "rate_mbit": rate, "compute_s": 0.05, "median_s": 2.0} for job in jobs]
    return {"title": title, "facts": facts}


def test_speed() -> None:
    title = "alexnet, batch 16, 4 hosts, compute 50 ms, 250 Mbit/s"
    hybrid, ps, ddp, small = read(
        speed(title, "hybrid", "ps not wait-free", "DDP", "DDP 5 MB", "ps+topk:0.01")
    )
    assert hybrid.scenario.layers == layers_of("alexnet")
    assert (hybrid.scenario.batch, hybrid.scenario.workers, hybrid.scenario.servers) == (16, 4, 0)
    assert (hybrid.scenario.bits_per_s, hybrid.scenario.compute_s, hybrid.measured_s) == (
        250e6,
        0.05,
        2.0,
    )
    assert (hybrid.scenario.exchange, hybrid.scenario.wait_free) == (PlannedExchange.HYBRID, True)
    assert (ps.scenario.exchange, ps.scenario.wait_free) == (PlannedExchange.PS, False)
    assert (ddp.scenario.exchange, ddp.scenario.bucket_bytes) == (PlannedExchange.RING, 25 * MIB)
    assert small.scenario.bucket_bytes == 5 * MIB


def test_hosts_that_only_serve_are_not_ddps() -> None:
    title = "alexnet, batch 32, 4 hosts and 4 that only serve, compute 50 ms, unshaped"
    ours, ddp = read(speed(title, "ps 4 servers", "DDP", rate=None))
    assert (ours.scenario.workers, ours.scenario.servers, ours.scenario.machine.cores) == (
        4,
        4,
        1.0,
    )
    assert (ddp.scenario.workers, ddp.scenario.servers, ddp.scenario.machine.cores) == (4, 0, 2.0)
    assert ours.scenario.bits_per_s == UNSHAPED_BITS_PER_S


def test_local_steps_and_codecs() -> None:
    title = "googlenet, batch 32, 2 hosts, compute 50 ms, 250 Mbit/s"
    steps, both, ring = read(speed(title, "ps+H8", "ps+H32+int8", "allreduce"))
    assert (steps.scenario.local_steps, steps.scenario.lossy, steps.lossy) == (8, None, True)
    assert (both.scenario.local_steps, both.scenario.lossy) == (32, WireCodec.INT8)
    assert (ring.scenario.exchange, ring.lossy) == (PlannedExchange.RING, False)


def test_the_recommended_scheme_is_compared_with_the_fastest() -> None:
    title = "alexnet, batch 32, 4 hosts, compute 50 ms, 250 Mbit/s"
    seconds = {
        "ps": 12.0,
        "hybrid": 1.1,
        "allreduce": 1.0,
        "ps+int8": 3.0,
        "ps+H32": 6.0,
        "DDP": 0.1,
    }
    facts = [
        {"job": job, "rate_mbit": 250.0, "compute_s": 0.05, "median_s": median_s, "cpu_s": 0.5}
        for job, median_s in seconds.items()
    ]
    found = choices([{"title": title, "facts": facts}], machine_of, net="", batch=1)
    exact, lossy = (row[1:] for row in found.rows)
    assert exact == ("exact", "hybrid", "1.100", "allreduce", "1.000", "10%")
    assert lossy == ("lossy", "ps+H32", "6.000", "ps+int8", "3.000", "100%")
    assert choices([speed(title, "ps", "DDP")], machine_of, net="", batch=1).rows == ()


def test_another_table_is_refused() -> None:
    with pytest.raises(ComparisonError, match="'Bytes per host' is none of the tables"):
        read({"title": "Bytes per host", "facts": []})
