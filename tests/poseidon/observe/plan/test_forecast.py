"""Predictions of all schemes, and what follows from them, for clusters whose outcome is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from poseidon.observe.plan.cluster_probe import NetworkLinks
from poseidon.observe.plan.costs import HostCosts
from poseidon.observe.plan.forecast import WAYS, PlannedCluster, Prediction, forecast, recommend
from poseidon.observe.plan.shapes import LayerShape
from poseidon.observe.plan.sources import Training

FREE = HostCosts(cores=8, free_cores=8.0, gpu="", flops=1e15)
SLOW = NetworkLinks(bits_per_s=100e6, latency_s=0.0)
DENSE = Training(
    name="dense",
    layers=tuple(
        LayerShape(name=f"fc{index}", tensors=((2000, 2000),), work=1, fully_connected=True)
        for index in range(4)
    ),
    batch=10,
    compute_s=0.1,
)
CONVOLUTIONS = replace(
    DENSE,
    name="conv",
    layers=tuple(replace(layer, fully_connected=False) for layer in DENSE.layers),
)
FOUR = PlannedCluster(workers=4, servers=0, network=SLOW, costs=FREE)
MODEL = 4 * 4 * 2000 * 2000


def by_name(found: list[Prediction]) -> dict[str, Prediction]:
    return {prediction.way.name: prediction for prediction in found}


def test_dense_layers_on_slow_links_travel_as_factors() -> None:
    found = forecast(DENSE, FOUR)
    named = by_name(found)
    assert named["ps"].link_bytes == pytest.approx(2 * MODEL * 3 / 4)
    assert named["hybrid"].link_bytes == pytest.approx(4 * 10 * 3 * 4000 * 4)
    assert named["ps"].iteration_s >= named["ps"].wire_s
    chosen = recommend(FOUR, found)
    assert chosen.flags == "--exchange=auto"
    assert any(
        "weights of fc0, fc1, fc2 and 1 other layer travel as factors" in reason
        for reason in chosen.reasons
    )


def test_factors_that_are_more_bytes_and_faster_are_recommended_with_the_reason() -> None:
    wide = replace(DENSE, layers=(replace(DENSE.layers[0], tensors=((500, 500),)),) * 3, batch=64)
    network = NetworkLinks(bits_per_s=1e9, latency_s=1e-3)
    slow_sums = replace(FREE, sum_s_per_byte=1e-7)
    cluster = PlannedCluster(workers=8, servers=0, network=network, costs=slow_sums)
    found = forecast(wide, cluster)
    named = by_name(found)
    assert named["svb"].link_bytes > named["ps"].link_bytes
    chosen = recommend(cluster, found)
    assert chosen.flags == "--exchange=svb"
    (reason,) = (reason for reason in chosen.reasons if "travel as factors" in reason)
    longer = named["ps"].iteration_s / named["svb"].iteration_s
    assert reason.endswith(
        "5.4 MB an iteration over a host's link. ps sends only 5.2 MB, and takes "
        f"{longer:.2f} times as long: its shards add and apply all gradients."
    )


def test_the_reasons_are_of_the_hosts_that_were_predicted() -> None:
    """On a part of a machine products take so long that no weight travels as factors."""
    cluster = replace(FOUR, costs=replace(FREE, free_cores=4.0, flops=1e8))
    found = forecast(DENSE, cluster, shared_by=4)
    named = by_name(found)
    assert named["auto"].link_bytes == named["ps"].link_bytes
    assert not any("as factors:" in reason for reason in recommend(cluster, found).reasons)


def test_fewer_bytes_take_less_time() -> None:
    named = by_name(forecast(CONVOLUTIONS, FOUR))
    for less, more in (
        ("ps, bfloat16", "ps"),
        ("ps, int8", "ps, bfloat16"),
        ("ps, 8 local steps", "ps"),
        ("ps, 32 local steps", "ps, 8 local steps"),
        ("DDP, fp16 hook", "DDP"),
        ("DDP, PowerSGD rank 4", "DDP, fp16 hook"),
    ):
        assert named[less].link_bytes < named[more].link_bytes
        assert named[less].iteration_s < named[more].iteration_s
    assert named["ps, bfloat16"].link_bytes == pytest.approx(named["ps"].link_bytes / 2)
    assert named["ps, 8 local steps"].link_bytes == pytest.approx(named["ps"].link_bytes / 8)


def test_lossy_ways_are_named_beside_an_exact_one() -> None:
    chosen = recommend(FOUR, forecast(CONVOLUTIONS, FOUR))
    assert chosen.flags in {way.flags for way in WAYS if way.exact}
    gains = dict(chosen.alternatives)
    assert "--exchange=ps --compress=int8" in gains
    assert list(gains.values()) == sorted(gains.values(), reverse=True)
    assert any("role=server" in reason for reason in chosen.reasons)


def test_on_fast_links_nothing_lossy_is_named_and_computation_is_the_limit() -> None:
    cluster = replace(FOUR, network=NetworkLinks(bits_per_s=1e12, latency_s=0.0))
    chosen = recommend(cluster, forecast(DENSE, cluster))
    assert chosen.flags == "--exchange=auto"
    assert chosen.alternatives == ()
    assert "the network hardly matters" in chosen.reasons[0]


def test_one_worker_exchanges_nothing() -> None:
    alone = replace(FOUR, workers=1)
    found = forecast(DENSE, alone)
    assert by_name(found)["ps"].link_bytes == 0
    assert recommend(alone, found).reasons == ("One worker exchanges nothing between hosts.",)


def test_serving_hosts_halve_the_bytes_of_ps_and_leave_ddp_as_it_is() -> None:
    plain, served = (by_name(forecast(CONVOLUTIONS, replace(FOUR, servers=n))) for n in (0, 4))
    assert served["ps"].link_bytes < 0.7 * plain["ps"].link_bytes
    assert served["DDP"].iteration_s == plain["DDP"].iteration_s


def test_hosts_that_share_a_machine_share_its_cores() -> None:
    costs = replace(FREE, cores=2, free_cores=2.0, wire_s_per_byte=1e-7)
    cluster = replace(FOUR, costs=costs)
    apart, together = (by_name(forecast(CONVOLUTIONS, cluster, shared_by=n)) for n in (1, 4))
    assert together["ps"].iteration_s > 1.5 * apart["ps"].iteration_s


def test_cores_that_other_work_has_are_not_planned_with() -> None:
    costs = replace(FREE, cores=2, free_cores=2.0, wire_s_per_byte=1e-7)
    idle, busy = (
        by_name(
            forecast(
                CONVOLUTIONS, replace(FOUR, costs=replace(costs, free_cores=free)), shared_by=4
            )
        )
        for free in (2.0, 1.0)
    )
    assert busy["ps"].iteration_s > 1.5 * idle["ps"].iteration_s


def test_auto_takes_what_is_fastest_by_time_not_by_bytes() -> None:
    # Factors are fewer bytes, but their products take longer than the links.
    slow_products = replace(FREE, flops=1e7)
    named = by_name(forecast(DENSE, replace(FOUR, costs=slow_products)))
    assert named["auto"].iteration_s == pytest.approx(named["ps"].iteration_s)
    assert named["hybrid"].iteration_s > 1.5 * named["auto"].iteration_s
    fast = by_name(forecast(DENSE, FOUR))
    assert fast["auto"].iteration_s == pytest.approx(fast["hybrid"].iteration_s)


def test_auto_takes_all_reduce_where_it_is_faster_by_far() -> None:
    costs = replace(FREE, cores=2, free_cores=2.0, wire_s_per_byte=1e-7)
    named = by_name(forecast(CONVOLUTIONS, replace(FOUR, costs=costs)))
    assert named["auto"].iteration_s == named["allreduce"].iteration_s < named["ps"].iteration_s


@pytest.mark.parametrize(
    ("virtual", "turns", "sums", "share"),
    [(4, 1, 1, 1 / 4), (16, 4, 1, 1 / 4), (12, 3, 2, 1 / 4), (7, 2, 1, 1 / 4)],
)
def test_a_worker_computes_for_its_virtual_workers_one_after_another(
    virtual: int, turns: int, sums: int, share: float
) -> None:
    """It sends one sum of a tensor's gradients for each node of the tree that is all its own."""
    found = by_name(forecast(CONVOLUTIONS, replace(FOUR, virtual_workers=virtual)))
    ps = found["ps"]
    assert ps.compute_s == pytest.approx(turns * CONVOLUTIONS.compute_s)
    out = sums * (1 - share) + 3 * share
    into = (1 - share) + 3 * sums * share
    assert ps.link_bytes == pytest.approx(MODEL * max(out, into))
    assert found["allreduce"].link_bytes == pytest.approx(MODEL * (sums + 1) * (1 - share))
    assert found["DDP"].link_bytes == pytest.approx(MODEL * 2 * (1 - share))
    steps, eighth = found["ps, 8 local steps"], 7 / 8 * turns * CONVOLUTIONS.compute_s
    assert steps.link_bytes == pytest.approx(ps.link_bytes / 8)
    assert steps.iteration_s > eighth + ps.iteration_s / 8


def test_the_plan_of_virtual_workers_does_not_depend_on_the_hosts() -> None:
    """Four of them send as factors what four hosts send so; two hosts alone have twice the rows."""
    four = by_name(forecast(DENSE, replace(FOUR, virtual_workers=4)))["auto"]
    two = by_name(forecast(DENSE, replace(FOUR, workers=2, virtual_workers=4)))["auto"]
    rows = 10 * 4000 * 4
    assert four.link_bytes == pytest.approx(4 * 3 * rows)
    assert two.link_bytes == pytest.approx(4 * 2 * rows)
