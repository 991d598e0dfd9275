from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from poseidon.engine.observation import Observation, log_plan, open_trace
from poseidon.errors import JobError
from poseidon.exchange.alone import AloneCarrier
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.cost import Choice, ExchangePlan
from poseidon.exchange.exchange import Built, Exchange
from poseidon.exchange.job_control import AloneControl
from poseidon.exchange.observer import Traffic
from poseidon.exchange.options import Scheme
from poseidon.observe.metrics.job_statistics import (
    TensorStatistics,
    WorkerStatistics,
    parsed,
)
from ps_server.trace import NO_TRACE
from tests.support.tracing import Recorded


class Counter(AloneCarrier):
    """Stands for a carrier that counts."""

    def traffic(self) -> Mapping[int, Traffic]:
        return {0: Traffic(bytes_out=100, bytes_in=200, on_way_s=5.0)}


def build(layer: nn.Linear, *schemes: Scheme, counts: bool = False) -> Built:
    tensors = [Trained(name=name, tensor=p) for name, p in layer.named_parameters()]
    choices = tuple(
        Choice(
            index=index,
            name=tensors[index].name,
            shape=tuple(tensors[index].tensor.shape),
            scheme=scheme,
            server_bytes=0,
            factor_bytes=None,
            allreduce_bytes=64,
        )
        for index, scheme in enumerate(schemes)
    )
    carrier = (Counter if counts else AloneCarrier)(tensors, ExchangeSettings())
    exchange = Exchange([carrier], AloneControl(), ExchangeSettings())
    return Built(exchange=exchange, plan=ExchangePlan(choices=choices))


def iterate(seen: Observation) -> None:
    seen.exchange.open(None)
    seen.exchange.start(0, 0.1)
    for index in range(2):
        seen.exchange.wait(index)
        seen.exchange.begin(index, torch.zeros(4 - 2 * index))
    seen.exchange.finish()


def observe(
    *schemes: Scheme, counts: bool = False, trace: Recorded | None = None
) -> tuple[list[dict[str, object]], nn.Linear]:
    """Observe a worker for one iteration. Return its events and its layer."""
    layer, events = nn.Linear(2, 2), list[dict[str, object]]()

    def send(event: str, **fields: object) -> None:
        events.append(json.loads(json.dumps({"event": event, **fields})))

    built = build(layer, *schemes, counts=counts)
    seen = Observation(built, [("layer", layer)], trace or NO_TRACE, send)
    seen.watch()
    iterate(seen)
    layer(torch.ones(1, 2)).sum().backward()
    seen.close()
    seen.close()
    return events, layer


def test_a_failure_while_statistics_are_sent_is_raised_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("poseidon.engine.observation.STATISTICS_S", 0.0)
    failed = threading.Event()

    def fail(event: str, **fields: object) -> None:
        failed.set()
        raise RuntimeError("no room")

    layer, trace = nn.Linear(2, 2), Recorded()
    seen = Observation(build(layer, Scheme.LOCAL, Scheme.LOCAL), [], trace, fail)
    assert failed.wait(60)
    with pytest.raises(RuntimeError, match="no room"):
        seen.close()
    seen.close()


def test_the_last_statistics_are_sent_at_the_end_and_the_launcher_reads_them() -> None:
    events, _ = observe(Scheme.SERVER, Scheme.LOCAL, counts=True)
    assert len(events) == 1
    statistics = parsed(WorkerStatistics, events[-1])
    assert statistics is not None
    assert statistics.iterations == 1
    weight, bias = statistics.tensors
    assert (weight.name, weight.scheme, weight.bytes_out, weight.bytes_in) == (
        "weight",
        "ps",
        100,
        200,
    )
    assert weight.hidden_s == pytest.approx(5 - weight.waited_s)
    assert bias == TensorStatistics(name="bias", scheme="local", waited_s=bias.waited_s)


def test_bytes_that_are_not_counted_are_unknown() -> None:
    events, _ = observe(Scheme.ALLREDUCE, Scheme.ALLREDUCE)
    statistics = parsed(WorkerStatistics, events[-1])
    assert statistics is not None
    assert statistics.tensors[0].bytes_out is None  # another worker exchanges for this one


def test_with_a_trace_layers_and_calls_are_seen_until_the_end() -> None:
    trace = Recorded()
    _, layer = observe(Scheme.SERVER, Scheme.SERVER, trace=trace)
    assert {("wait", "weight"), ("begin", "bias"), ("iteration", "0"), ("forward", "layer")} <= set(
        trace.names()
    )
    assert ("backward", "layer") in trace.names()
    assert not trace.closed  # its owner does
    count = len(trace.spans)
    layer(torch.ones(1, 2)).sum().backward()
    assert len(trace.spans) == count


def test_the_traces_name_and_place(tmp_path: Path) -> None:
    open_trace(tmp_path, 3).close()
    assert [path.name for path in tmp_path.iterdir()] == ["trace_worker_3.json"]
    with pytest.raises(JobError, match="cannot write the trace"):
        open_trace(tmp_path / "nowhere", 0)


def test_a_plan_that_cannot_be_kept_is_told_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "exchange_plan.txt").symlink_to("/dev/full")
    with caplog.at_level(logging.INFO):
        log_plan(ExchangePlan(choices=()), tmp_path)
    assert (
        "exchange_plan.txt: No space left on device; the job continues without it"
        in caplog.messages[1]
    )
    assert caplog.messages[0].startswith("no tensor is exchanged: 0 B an iteration")
