"""What limits a job: one cause, named where it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from poseidon.observe.dashboard.bottleneck import (
    Bottleneck,
    JobLimit,
    ShardLoad,
    WorkerLoad,
    find_bottleneck,
)

HOSTS = ("node0", "node1", "node2", "node3")


def worker(rank: int, **more: Any) -> WorkerLoad:
    host = HOSTS[rank]
    peers = {other: 0.1 for other in HOSTS if other != host}
    load = WorkerLoad(rank=rank, host=host, iterations=10.0, waited=0.05, read=0.0, sending=peers)
    return replace(load, **more)


def test_nothing_is_known_before_the_first_iterations() -> None:
    assert find_bottleneck([], []).cause is JobLimit.UNKNOWN
    assert find_bottleneck([worker(0, iterations=0.0)], []).cause is JobLimit.UNKNOWN


@pytest.mark.parametrize(
    ("busy", "advice"),
    [
        ((1.0, 1.0, 0.9, 1.0), "All processors are busy"),
        ((1.0, 1.0, 0.5, 1.0), "More workers make the job faster"),
        ((0.1, 0.1, 0.1, 0.1), "More workers make the job faster"),
    ],
)
def test_more_workers_are_advised_only_where_a_processor_is_free(
    busy: tuple[float, ...], advice: str
) -> None:
    workers = [worker(rank, host_busy=part) for rank, part in enumerate(busy)]
    found = find_bottleneck(workers, [])
    assert found.cause is JobLimit.COMPUTE
    assert found.advice.startswith(advice)


def test_one_worker_alone_is_limited_by_compute() -> None:
    assert find_bottleneck([worker(0, waited=0.0)], []).cause is JobLimit.COMPUTE


def in_job(
    waited: float,
    workers: Mapping[int, Mapping[str, float]] = MappingProxyType({}),
    links: Mapping[str, float] = MappingProxyType({}),
    shards: Mapping[int, float] = MappingProxyType({}),
    **more: float,
) -> Bottleneck:
    """Return what limits a job of four hosts with a worker and a shard each.

    Args:
        waited: by all workers.
        workers: what is different for some.
        links: how busy all connections from and to a host are.
        shards: how busy some are.
    """

    def sending(host: str) -> dict[str, float]:
        peers = [peer for peer in HOSTS if peer != host]
        return {peer: links.get(peer, links.get(host, 0.1)) for peer in peers}

    loads = [
        worker(rank, **{"waited": waited, **more, **workers.get(rank, {})}, sending=sending(host))
        for rank, host in enumerate(HOSTS)
    ]
    return find_bottleneck(
        loads,
        [
            ShardLoad(index=n, host=host, busy=shards.get(n, 0.2), sending=sending(host))
            for n, host in enumerate(HOSTS)
        ],
    )


@pytest.mark.parametrize(
    ("found", "cause", "where", "words"),
    [
        (in_job(0.05), JobLimit.COMPUTE, "", "workers wait for each other 5 % of the time"),
        (
            in_job(0.6, {2: {"waited": 0.02, "read": 0.6}}),
            *(JobLimit.DATA, "worker 2", "worker 2 on node2 waits for data 60 % of the time"),
        ),
        (  # though the others wait on the network too
            in_job(0.6, {1: {"waited": 0.0}}, {"node3": 0.9}),
            *(JobLimit.WORKER, "worker 1", "100 ms of its own for an iteration, and the others 40"),
        ),
        (in_job(0.5, {2: {"waited": 0.0}}, read=0.25), JobLimit.WORKER, "worker 2", ""),
        (in_job(0.3, {1: {"waited": 0.02}}), JobLimit.COMPUTE, "", ""),
        (in_job(0.95, {1: {"waited": 0.88}}, {"node3": 0.8}), JobLimit.LINK, "node3", ""),
        # who sends to an overloaded shard has always something to send
        (in_job(0.7, links={"node2": 0.9}, shards={2: 0.95}), JobLimit.SHARD, "shard 2", ""),
        (in_job(0.7, links={"node3": 0.95}), JobLimit.LINK, "node3", "The link of node3"),
        (
            in_job(0.7, links=dict.fromkeys(HOSTS, 0.9)),
            *(JobLimit.LINK, "", "The links are the limit: they carry data 100 % of the time"),
        ),
        (
            in_job(0.7, host_busy=0.97),
            *(JobLimit.COMPUTE, "node0", "the processors of node0 are busy 97 % of the time"),
        ),
        (in_job(0.7), JobLimit.UNKNOWN, "", "70 % of the time, and no link and no shard is busy"),
    ],
)
def test_what_limits_a_job(found: Bottleneck, cause: JobLimit, where: str, words: str) -> None:
    assert (found.cause, found.where) == (cause, where)
    assert words in found.sentence
    assert found.sentence.endswith(".")


def test_a_link_explains_waits_that_are_short() -> None:
    found = in_job(0.3, links={"node1": 0.15})
    assert found.cause is JobLimit.LINK
    assert "--compress=int8" in found.advice


def served(busy: dict[str, float]) -> tuple[list[WorkerLoad], list[ShardLoad]]:
    """Return a job of three hosts that work and one that serves, by how busy the connections of
    each with that one are.
    """
    workers = [worker(rank, waited=0.8, sending={"node3": busy[HOSTS[rank]]}) for rank in range(3)]
    return workers, [ShardLoad(index=0, host="node3", busy=0.1, sending=dict(busy))]


def test_the_link_of_a_host_that_all_others_use() -> None:
    found = find_bottleneck(*served({"node0": 0.4, "node1": 0.45, "node2": 0.4}))
    assert (found.cause, found.where) == (JobLimit.LINK, "node3")


def test_the_link_of_one_of_those_that_use_it() -> None:
    found = find_bottleneck(*served({"node0": 0.02, "node1": 0.45, "node2": 0.02}))
    assert (found.cause, found.where) == (JobLimit.LINK, "node1")


def test_a_ring_over_a_slow_link() -> None:
    peers = ({"node1": 0.02}, {"node2": 0.9}, {"node3": 0.85}, {"node0": 0.02})
    workers = [worker(rank, waited=0.8, sending=sending) for rank, sending in enumerate(peers)]
    found = find_bottleneck(workers, [])
    assert (found.cause, found.where) == (JobLimit.LINK, "node2")


def test_a_link_between_two_hosts_is_that_of_both() -> None:
    workers = [
        worker(0, waited=0.8, sending={"node1": 0.5}),
        worker(1, waited=0.8, sending={"node0": 0.4}),
    ]
    found = find_bottleneck(workers, [])
    assert (found.cause, found.where) == (JobLimit.LINK, "")
    assert "they carry data 90 % of the time" in found.sentence
