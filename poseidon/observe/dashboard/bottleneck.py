"""What limits a job, from the times of its processes: compute, a link, a shard, a worker, or the
data reader.

Law: pure. One cause is named. The others wait for the worker that waits least, so its time comes
first: if it hardly waits, its data or its compute is the limit. Else all wait for the network or
for a shard, and the busier one is the limit.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from poseidon.cluster.supervision.stragglers import excess_s

READS = 0.25
"""The part of a worker's time that waits for data, from which the reader is the limit."""
WAITS = 0.15
"""The part of its time that the busiest worker waits for others, up to which compute is the
limit.
"""
EXPLAINS = 0.4
"""The part of the workers' waits from which a busy link or shard explains them."""
SLOWER = 1.5
"""How many times as busy as the others the links of a host are, from which that host is the
limit.
"""
SHARD_BUSY = 0.6
"""The part of the time from which a shard is the limit, however busy links are:
what it does not receive stays on them.
"""
HOST_BUSY = 0.85
"""The part of the time from which a host has no processor left."""
ALL_BUSY = (
    "All processors are busy: more workers on these machines do not help; more machines or GPUs do."
)


class JobLimit(Enum):
    """What limits a job."""

    UNKNOWN = "unknown"
    COMPUTE = "compute"
    DATA = "data"
    WORKER = "worker"
    SHARD = "shard"
    LINK = "link"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A worker over some seconds.

    Attributes:
        iterations: a second.
        waited, read: the parts of the time in which it waited for other workers or shards, and for
            its data; 0..1.
        sending: for each other host the part of the time in which a connection had something to
            send; 0..1.
        host_busy: the busy part of its host's processors; 0..1.
    """

    rank: int
    host: str
    iterations: float
    waited: float
    read: float
    sending: Mapping[str, float]
    host_busy: float = 0.0

    @property
    def read_s(self) -> float:
        """Seconds of an iteration in which it waits for its data; 0 without an iteration."""
        return self.read / self.iterations if self.iterations else 0.0

    @property
    def own_s(self) -> float:
        """Seconds of an iteration in which it waits for nothing; 0 without an iteration."""
        return max(0.0, 1.0 - self.waited - self.read) / self.iterations if self.iterations else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLoad:
    """A shard over some seconds.

    Attributes:
        busy: the part of the time in which it works, or has no processor; 0..1.
        sending: as of `WorkerLoad`.
    """

    index: int
    host: str
    busy: float
    sending: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What limits a job.

    Attributes:
        where: the worker, shard or host; empty where it is all of them.
        sentence: for people.
        advice: what to do.
    """

    cause: JobLimit
    where: str = ""
    sentence: str
    advice: str = ""


def find_bottleneck(workers: Sequence[WorkerLoad], shards: Sequence[ShardLoad]) -> Bottleneck:
    """Return what limits a job, from the loads of its processes over the same seconds."""
    if not workers or not any(worker.iterations for worker in workers):
        return Bottleneck(cause=JobLimit.UNKNOWN, sentence="Not enough has been measured yet.")
    last = min(workers, key=lambda worker: worker.waited)  # the others wait for it
    slowest = max(workers, key=lambda worker: worker.own_s)
    others_s = [worker.own_s for worker in workers if worker is not slowest]
    iteration_s = 1.0 / slowest.iterations if slowest.iterations else 0.0
    excess = excess_s(slowest.own_s, others_s, iteration_s)
    if last.read >= READS and last.read_s >= excess:
        return _data(last)
    if excess:
        return _straggler(slowest, statistics.median(others_s))
    waiting = statistics.median(worker.waited for worker in workers)
    if last.waited <= WAITS:
        full = min(worker.host_busy for worker in workers) >= HOST_BUSY
        return Bottleneck(
            cause=JobLimit.COMPUTE,
            sentence=f"Compute is the limit: workers wait for each other {_percent(waiting)} of "
            "the time.",
            advice=ALL_BUSY if full else "More workers make the job faster.",
        )
    links = _busy_links([*workers, *shards])
    carrying = max(links.values(), default=0.0)
    busiest = max(shards, key=lambda shard: shard.busy, default=None)
    if busiest is not None and busiest.busy >= min(SHARD_BUSY, max(carrying, EXPLAINS * waiting)):
        return _shard(busiest, waiting)
    if carrying >= EXPLAINS * waiting:
        return _link(links, waiting)
    return _processors(workers, waiting)


def _data(worker: WorkerLoad) -> Bottleneck:
    return Bottleneck(
        cause=JobLimit.DATA,
        where=f"worker {worker.rank}",
        sentence=f"The data reader is the limit: worker {worker.rank} on {worker.host} waits for "
        f"data {_percent(worker.read)} of the time.",
        advice="Convert the data to LMDB, make the images smaller, or move the data to a faster "
        "disk.",
    )


def _straggler(worker: WorkerLoad, usual_s: float) -> Bottleneck:
    return Bottleneck(
        cause=JobLimit.WORKER,
        where=f"worker {worker.rank}",
        sentence=f"Worker {worker.rank} on {worker.host} is the limit: it needs "
        f"{worker.own_s * 1e3:.0f} ms of its own "
        f"for an iteration, and the others {usual_s * 1e3:.0f} ms.",
        advice="Look for other programs on that host. Bounded staleness (--staleness) helps "
        "if it is not always the same worker.",
    )


def _shard(shard: ShardLoad, waiting: float) -> Bottleneck:
    return Bottleneck(
        cause=JobLimit.SHARD,
        where=f"shard {shard.index}",
        sentence=f"Shard {shard.index} on {shard.host} is the limit: it is busy "
        f"{_percent(shard.busy)} of the time, and workers wait {_percent(waiting)}.",
        advice="Use more shards (--shards), or hosts that only serve (role=server).",
    )


def _link(links: Mapping[frozenset[str], float], waiting: float) -> Bottleneck:
    """Name the host whose links are busiest, or all links."""
    hosts = sorted({host for link in links for host in link})
    of_host = {host: _mean(links, host, touching=True) for host in hosts}
    rest = {host: _mean(links, host, touching=False) for host in hosts}
    worst = max(hosts, key=lambda host: of_host[host] - rest[host])
    advice = (
        "Send fewer bytes: --compress=int8, --exchange=hybrid or --wire_precision=float16; "
        "`poseidon doctor` measures the links."
    )
    if len(hosts) > 2 and of_host[worst] >= SLOWER * rest[worst]:
        carrying = max(busy for link, busy in links.items() if worst in link)
        return Bottleneck(
            cause=JobLimit.LINK,
            where=worst,
            sentence=f"The link of {worst} is the limit: it carries data {_percent(carrying)} of "
            f"the time, and the others {_percent(rest[worst])}.",
            advice=advice,
        )
    return Bottleneck(
        cause=JobLimit.LINK,
        sentence=f"The links are the limit: they carry data {_percent(max(links.values()))} of "
        f"the time, and workers wait {_percent(waiting)}.",
        advice=advice,
    )


def _processors(workers: Sequence[WorkerLoad], waiting: float) -> Bottleneck:
    """Name the host whose processors are busy, or no cause."""
    loaded = max(workers, key=lambda worker: worker.host_busy)
    if loaded.host_busy >= HOST_BUSY:
        return Bottleneck(
            cause=JobLimit.COMPUTE,
            where=loaded.host,
            sentence=f"Compute is the limit: the processors of {loaded.host} are busy "
            f"{_percent(loaded.host_busy)} of the time, and workers wait {_percent(waiting)}.",
            advice="Start fewer processes there, or use more hosts.",
        )
    return Bottleneck(
        cause=JobLimit.UNKNOWN,
        sentence=f"Workers wait for each other {_percent(waiting)} of the time, and no link and "
        "no shard is busy.",
        advice="Look at the timeline of an iteration (--trace).",
    )


def _busy_links(processes: Sequence[WorkerLoad | ShardLoad]) -> dict[frozenset[str], float]:
    """Return for each pair of hosts the part of the time in which data travels between them.

    Each way counts with its busiest connection. The two ways add up: values travel when gradients
    have.
    """
    ways: dict[tuple[str, str], float] = {}
    for process in processes:
        for peer, part in process.sending.items():
            if peer != process.host:
                way = (process.host, peer)
                ways[way] = max(ways.get(way, 0.0), part)
    links: dict[frozenset[str], float] = {}
    for way, part in ways.items():
        links[frozenset(way)] = min(1.0, links.get(frozenset(way), 0.0) + part)
    return links


def _mean(links: Mapping[frozenset[str], float], host: str, *, touching: bool) -> float:
    """Return the mean over the links of a host, or over all others; 0 without any."""
    found = [busy for link, busy in links.items() if (host in link) is touching]
    return statistics.fmean(found) if found else 0.0


def _percent(part: float) -> str:
    return f"{min(1.0, max(0.0, part)) * 100:.0f} %"
