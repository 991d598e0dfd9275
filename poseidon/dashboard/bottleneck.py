"""What limits a job, from the times of its processes: compute, a link, a shard, a worker, or the data reader.

Law: pure. One cause is named; the order of the rules is the order in which a cause hides the next one: a worker that waits
for its data delays all others, and a shard that is overloaded keeps connections busy.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

READS = 0.25
"""The part of a worker's time that waits for data, from which the reader is the limit."""
WAITS = 0.15
"""The part of the workers' time that waits for others, up to which compute is the limit."""
SLOWER = 1.5
"""How many times the others' own time a worker needs, from which it is the limit."""
LEAST_DIFFERENCE_S = 0.005
SHARD_BUSY = 0.6
LINK_BUSY = 0.4
HOST_BUSY = 0.85


class Cause(Enum):
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
        rank: of the worker.
        host: it runs on.
        iterations: a second.
        waited, read: the parts of the time in which it waited for other workers or shards, and for its data; 0..1.
        sending: for each other host the part of the time in which a connection had something to send; 0..1.
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
    def own_s(self) -> float:
        """Seconds of an iteration in which it waits for nothing; 0 without an iteration."""
        return max(0.0, 1.0 - self.waited - self.read) / self.iterations if self.iterations else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLoad:
    """A shard over some seconds; `busy` and `sending` as of `WorkerLoad`."""

    index: int
    host: str
    busy: float
    sending: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What limits a job.

    Attributes:
        cause: of what kind.
        where: the worker, shard or host; empty where it is all of them.
        sentence: for people.
        advice: what to do.
    """

    cause: Cause
    where: str = ""
    sentence: str
    advice: str = ""


def find_bottleneck(workers: Sequence[WorkerLoad], shards: Sequence[ShardLoad]) -> Bottleneck:
    """Return what limits a job, from the loads of its processes over the same seconds."""
    if not workers or not any(worker.iterations for worker in workers):
        return Bottleneck(cause=Cause.UNKNOWN, sentence="Not enough has been measured yet.")
    reading = max(workers, key=lambda worker: worker.read)
    if reading.read >= READS:
        return Bottleneck(
            cause=Cause.DATA,
            where=f"worker {reading.rank}",
            sentence=f"The data reader is the limit: worker {reading.rank} on {reading.host} waits for data "
            f"{_percent(reading.read)} of the time.",
            advice="Convert the data to LMDB, make the images smaller, or move the data to a faster disk.",
        )
    waiting = statistics.median(worker.waited for worker in workers)
    slowest = max(workers, key=lambda worker: worker.own_s)
    others = [worker.own_s for worker in workers if worker is not slowest]
    if others:
        usual = statistics.median(others)
        if slowest.own_s >= SLOWER * usual and slowest.own_s - usual >= LEAST_DIFFERENCE_S:
            return Bottleneck(
                cause=Cause.WORKER,
                where=f"worker {slowest.rank}",
                sentence=f"Worker {slowest.rank} on {slowest.host} is the limit: it needs "
                f"{slowest.own_s * 1e3:.0f} ms of its own for an iteration, and the others {usual * 1e3:.0f} ms.",
                advice="Look for other programs on that host; or use bounded staleness (--staleness).",
            )
    if waiting <= WAITS:
        return Bottleneck(
            cause=Cause.COMPUTE,
            sentence=f"Compute is the limit: workers wait for each other {_percent(waiting)} of the time.",
            advice="More workers make the job faster.",
        )
    busiest = max(shards, key=lambda shard: shard.busy, default=None)
    if busiest is not None and busiest.busy >= SHARD_BUSY:
        return Bottleneck(
            cause=Cause.SHARD,
            where=f"shard {busiest.index}",
            sentence=f"Shard {busiest.index} on {busiest.host} is the limit: it works {_percent(busiest.busy)} of the time, "
            f"and workers wait {_percent(waiting)}.",
            advice="Use more shards (--num_comm_channels_per_client), or hosts that only serve (role=server).",
        )
    return _link(workers, shards, waiting)


def _link(workers: Sequence[WorkerLoad], shards: Sequence[ShardLoad], waiting: float) -> Bottleneck:
    """Name the host whose link is busiest, or all links, or no cause."""
    links = _busy_links([*workers, *shards])
    if not links or max(links.values()) < LINK_BUSY:
        loaded = max(workers, key=lambda worker: worker.host_busy)
        if loaded.host_busy >= HOST_BUSY:
            return Bottleneck(
                cause=Cause.COMPUTE,
                where=loaded.host,
                sentence=f"Compute is the limit: the processors of {loaded.host} are busy {_percent(loaded.host_busy)} of the "
                f"time, and workers wait {_percent(waiting)}.",
                advice="Start fewer processes there, or use more hosts.",
            )
        return Bottleneck(
            cause=Cause.UNKNOWN,
            sentence=f"Workers wait for each other {_percent(waiting)} of the time, and no link and no shard is busy.",
            advice="Look at the timeline of an iteration (--trace).",
        )
    hosts = sorted({host for link in links for host in link})
    of_host = {
        host: statistics.median([busy for link, busy in links.items() if host in link]) for host in hosts
    }
    rest = {
        host: statistics.median([busy for link, busy in links.items() if host not in link] or [of_host[host]])
        for host in hosts
    }
    worst = max(hosts, key=lambda host: of_host[host] - rest[host])
    advice = (
        "Send fewer bytes: --exchange=hybrid, --wire_precision=float16; `poseidon doctor` measures the links."
    )
    if len(hosts) > 2 and of_host[worst] >= SLOWER * rest[worst]:
        return Bottleneck(
            cause=Cause.LINK,
            where=worst,
            sentence=f"The link of {worst} is the limit: it carries data {_percent(of_host[worst])} of the time, and the "
            f"others {_percent(rest[worst])}.",
            advice=advice,
        )
    return Bottleneck(
        cause=Cause.LINK,
        sentence=f"The links are the limit: they carry data {_percent(max(links.values()))} of the time, and workers wait "
        f"{_percent(waiting)}.",
        advice=advice,
    )


def _busy_links(processes: Sequence[WorkerLoad | ShardLoad]) -> dict[tuple[str, str], float]:
    """Return for each link, from host to host, the part of the time of its busiest connection."""
    links: dict[tuple[str, str], float] = {}
    for process in processes:
        for peer, part in process.sending.items():
            if peer != process.host:
                link = (process.host, peer)
                links[link] = max(links.get(link, 0.0), part)
    return links


def _percent(part: float) -> str:
    return f"{min(1.0, max(0.0, part)) * 100:.0f} %"
