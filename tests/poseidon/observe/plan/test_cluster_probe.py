"""What is made of a survey of links, and the program that measures a host's processors."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from poseidon.cluster.doctor.survey import HostReport, LinkReport, Survey
from poseidon.errors import JobError
from poseidon.observe.plan import cluster_probe
from poseidon.observe.plan.cluster_probe import local_costs, network_of, transfer_s
from poseidon.observe.plan.costs import HostCosts, worst
from poseidon.observe.plan.shapes import CoreCosts
from tests.support.shadowing_files import write_shadowing_files

HOSTS = tuple(
    HostReport(clients=(n,), label=f"node{n}", address=f"10.0.0.{n}", facts={}) for n in range(2)
)


def link(source: int, target: int, rate: float | None, rtt_s: float = 2e-4) -> LinkReport:
    return LinkReport(source=source, target=target, bytes_per_s=rate, rtt_s=rtt_s)


def test_the_slowest_link_counts_and_half_of_the_median_round_trip() -> None:
    network = network_of(Survey(hosts=HOSTS, links=(link(0, 1, 100e6), link(1, 0, 12.5e6))))
    assert network.bits_per_s == pytest.approx(100e6)
    assert network.latency_s == pytest.approx(1e-4)
    assert network.measured


@pytest.mark.parametrize(
    ("links", "where"),
    [((link(0, 1, 1e6), link(1, 0, None)), "from node1 to node0 "), ((), "the link cannot")],
)
def test_a_link_that_carries_nothing_is_one_sentence(
    links: tuple[LinkReport, ...], where: str
) -> None:
    with pytest.raises(JobError, match=rf"{where}.*poseidon doctor"):
        network_of(Survey(hosts=HOSTS, links=links))


@pytest.mark.parametrize(("hosts", "limit_s"), [(2, 30.0), (4, 30.0), (8, 30.0)])
def test_all_rounds_fit_the_limit(hosts: int, limit_s: float) -> None:
    each = transfer_s(hosts, limit_s)
    assert (hosts - 1) * (cluster_probe.ROUND_S + 2 * each) + cluster_probe.COSTS_S <= limit_s
    assert each >= cluster_probe.LEAST_TRANSFER_S


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_hosts_processors_are_measured_by_a_program_that_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_probe, "COSTS_S", 0.1)
    monkeypatch.chdir(tmp_path)
    write_shadowing_files(tmp_path, packages=True)
    costs = local_costs(1)
    assert costs.cores >= 1
    assert 0 < costs.free_cores <= costs.cores
    assert costs.flops > 1e6
    for entry in fields(CoreCosts):
        assert 0 <= getattr(costs, entry.name) < (0.1 if entry.name == "message_s" else 1e-5)
    assert all(
        getattr(costs, name) > 0
        for name in ("memory_s_per_byte", "sum_s_per_byte", "rule_s_per_byte")
    )


def test_the_slowest_host_counts_in_everything() -> None:
    def host(cores: int, cost: float, gpu: str = "") -> HostCosts:
        costs = {entry.name: cost for entry in fields(CoreCosts)}
        return HostCosts(cores=cores, free_cores=cores / 2, gpu=gpu, flops=1 / cost, **costs)

    found = worst([host(2, 1.0, "A"), host(8, 4.0)])
    assert found == host(2, 4.0)
    assert worst([host(2, 1.0, "A"), host(4, 1.0, "A")]).gpu == "A"
