"""What limits a job: one cause, named where it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from poseidon.observe.dashboard.bottleneck import JobLimit, ShardLoad, WorkerLoad, find_bottleneck

HOSTS = ("node0", "node1", "node2", "node3")


def worker(rank: int, **more: Any) -> WorkerLoad:
    host = HOSTS[rank]
    peers = {other: 0.1 for other in HOSTS if other != host}
    load = WorkerLoad(rank=rank, host=host, iterations=10.0, waited=0.05, read=0.0, sending=peers)
    return replace(load, **more)


def job(**more: Any) -> tuple[list[WorkerLoad], list[ShardLoad]]:
    """Return a job of four hosts whose workers all have a load."""
    shards = [
        ShardLoad(
            index=n, host=host, busy=0.2, sending={other: 0.1 for other in HOSTS if other != host}
        )
        for n, host in enumerate(HOSTS)
    ]
    return [worker(rank, **more) for rank in range(4)], shards


def busy_link(workers: list[WorkerLoad], shards: list[ShardLoad], host: str, busy: float) -> None:
    """Let all connections from and to a host be busy."""

    def sending(load: WorkerLoad | ShardLoad) -> dict[str, float]:
        return {
            peer: busy if host in (peer, load.host) else part for peer, part in load.sending.items()
        }

    workers[:] = [replace(load, sending=sending(load)) for load in workers]
    shards[:] = [replace(load, sending=sending(load)) for load in shards]


def test_nothing_is_known_before_the_first_iterations() -> None:
    assert find_bottleneck([], []).cause is JobLimit.UNKNOWN
    assert find_bottleneck([worker(0, iterations=0.0)], []).cause is JobLimit.UNKNOWN


def test_workers_that_hardly_wait_are_limited_by_compute() -> None:
    found = find_bottleneck(*job())
    assert found.cause is JobLimit.COMPUTE
    assert found.sentence == "Compute is the limit: workers wait for each other 5 % of the time."


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


def test_a_worker_that_waits_for_its_data_delays_the_others() -> None:
    workers, shards = job(waited=0.6)
    workers[2] = worker(2, waited=0.02, read=0.6)
    found = find_bottleneck(workers, shards)
    assert (found.cause, found.where) == (JobLimit.DATA, "worker 2")
    assert "worker 2 on node2 waits for data 60 % of the time" in found.sentence


def test_a_straggler_is_named_though_the_others_wait_on_the_network_too() -> None:
    workers, shards = job(waited=0.6)
    workers[1] = worker(1, waited=0.0)
    busy_link(workers, shards, "node3", 0.9)
    found = find_bottleneck(workers, shards)
    assert (found.cause, found.where) == (JobLimit.WORKER, "worker 1")
    assert "it needs 100 ms of its own for an iteration, and the others 40 ms" in found.sentence


def test_readers_that_are_all_slow_do_not_hide_a_straggler() -> None:
    workers, shards = job(waited=0.5, read=0.25)
    workers[2] = worker(2, waited=0.0, read=0.25)
    found = find_bottleneck(workers, shards)
    assert (found.cause, found.where) == (JobLimit.WORKER, "worker 2")


def test_a_worker_that_is_a_little_slower_is_compute() -> None:
    workers, shards = job(waited=0.3)
    workers[1] = worker(1, waited=0.02)
    assert find_bottleneck(workers, shards).cause is JobLimit.COMPUTE


def test_own_times_that_differ_by_a_small_part_of_an_iteration_name_no_worker() -> None:
    workers, shards = job(waited=0.95)
    workers[1] = worker(1, waited=0.88)
    busy_link(workers, shards, "node3", 0.8)
    found = find_bottleneck(workers, shards)
    assert (found.cause, found.where) == (JobLimit.LINK, "node3")


def test_a_link_explains_waits_that_are_short() -> None:
    workers, shards = job(waited=0.3)
    busy_link(workers, shards, "node1", 0.15)
    for index, load in enumerate(workers):
        workers[index] = replace(load, sending={**load.sending, "node1": 0.15})
    found = find_bottleneck(workers, shards)
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


def test_a_shard_that_works_all_the_time() -> None:
    workers, shards = job(waited=0.7)
    # who sends to an overloaded shard has always something to send
    busy_link(workers, shards, "node2", 0.9)
    shards[2] = replace(shards[2], busy=0.95)
    found = find_bottleneck(workers, shards)
    assert (found.cause, found.where) == (JobLimit.SHARD, "shard 2")


def test_a_link_that_is_slower_than_the_others() -> None:
    workers, shards = job(waited=0.7)
    busy_link(workers, shards, "node3", 0.95)
    found = find_bottleneck(workers, shards)
    assert (found.cause, found.where) == (JobLimit.LINK, "node3")
    assert found.sentence.startswith("The link of node3 is the limit")


def test_links_that_are_all_slow() -> None:
    workers, shards = job(waited=0.7)
    for host in HOSTS:
        busy_link(workers, shards, host, 0.9)
    found = find_bottleneck(workers, shards)
    assert (found.cause, found.where) == (JobLimit.LINK, "")
    assert found.sentence.startswith("The links are the limit: they carry data 100 % of the time")


def test_processors_that_are_all_busy() -> None:
    found = find_bottleneck(*job(waited=0.7, host_busy=0.97))
    assert found.cause is JobLimit.COMPUTE
    assert "the processors of node0 are busy 97 % of the time" in found.sentence


def test_a_wait_without_a_busy_part_is_said_so() -> None:
    found = find_bottleneck(*job(waited=0.7))
    assert found.cause is JobLimit.UNKNOWN
    assert (
        found.sentence
        == "Workers wait for each other 70 % of the time, and no link and no shard is busy."
    )


@pytest.mark.parametrize("waited", [0.0, 0.05, 0.15])
def test_every_finding_is_a_sentence(waited: float) -> None:
    assert find_bottleneck(*job(waited=waited)).sentence.endswith(".")
