"""The plan of a job: hosts and devices in, workers and shards out.

Law: pure and deterministic. Worker ranks run over the hosts that work, device by device; shard
indices over those that serve, channel by channel; every process that is given the same hosts and
numbers computes the same plan. Where hosts that only serve stand beside working ones, the shards
are loaded so that all links carry the same (`best_loads`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import gcd

from poseidon.cluster.machinefile import Host, HostRole, has_remote_hosts
from poseidon.errors import UsageError, counted
from ps_server.protocol.seats import Seat, Seats


class Role(Enum):
    """The role of a process of a job."""

    WORKER = "worker"  # trains a replica on one device
    SHARD = "shard"  # holds some of the parameter server's keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessName:
    """The name of one process of a job: a key in tables, and its name in messages."""

    role: Role
    index: int
    client: int
    host: str

    @property
    def short(self) -> str:
        """The name without its host: `worker 1`."""
        return f"{self.role.value} {self.index}"

    def describe(self, pid: int | None = None) -> str:
        """Return the full name in messages: `worker 1 (client 1, 127.0.0.1, pid 4711)`."""
        process = f", pid {pid}" if pid is not None else ""
        return f"{self.short} (client {self.client}, {self.host}{process})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker.

    Attributes:
        host: the one it runs on.
        seat: its place among the machines that work, and on its own.
        device: `cpu` or `cuda:<n>`.
    """

    host: Host
    seat: Seat
    device: str

    @property
    def rank(self) -> int:
        """0..W-1 over the whole job."""
        return self.seat.rank

    @property
    def process(self) -> ProcessName:
        return ProcessName(
            role=Role.WORKER, index=self.rank, client=self.host.id, host=self.host.name
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """One server shard.

    Attributes:
        index: 0..P-1 over the whole job.
        host: the one it runs on.
        channel: 0..(shards of that host)-1.
        address: what it binds to, `tcp://host:port`; port 0: any free one.
        home: the position of its machine among those that work; -1 - j on the j-th machine that
            only serves.
        load: the load it is to carry, relative to the other shards; at least 1.
    """

    index: int
    host: Host
    channel: int
    address: str
    home: int = 0
    load: int = 1

    @property
    def process(self) -> ProcessName:
        return ProcessName(
            role=Role.SHARD, index=self.index, client=self.host.id, host=self.host.name
        )

    @property
    def port(self) -> int:
        """The port of its address."""
        return int(self.address.rpartition(":")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """All roles of a job, by rank and by index."""

    hosts: tuple[Host, ...]
    workers: tuple[WorkerPlan, ...]
    shards: tuple[ShardPlan, ...]

    @property
    def roles(self) -> tuple[ShardPlan | WorkerPlan, ...]:
        """Every process of the job, shards first."""
        return (*self.shards, *self.workers)

    @property
    def worker_count(self) -> int:
        """W, the number of replicas."""
        return len(self.workers)

    @property
    def shard_count(self) -> int:
        """P, the number of server shards."""
        return len(self.shards)

    @property
    def working_hosts(self) -> int:
        """The number of machines with workers."""
        return len(self.workers_by_host)

    @property
    def workers_by_host(self) -> tuple[int, ...]:
        """The number of workers of each machine that works, by position."""
        return tuple(Counter(worker.seat.host for worker in self.workers).values())

    def workers_on(self, host: Host) -> int:
        """Return the number of workers of a machine."""
        return sum(worker.host.id == host.id for worker in self.workers)

    @property
    def has_dedicated_servers(self) -> bool:
        """Whether some machine only serves."""
        return any(host.role is HostRole.SERVER for host in self.hosts)

    @property
    def homes(self) -> tuple[int, ...]:
        """Where each shard lives (`ShardPlan.home`)."""
        return tuple(shard.home for shard in self.shards)

    @property
    def loads(self) -> tuple[int, ...]:
        """The relative load of each shard; empty where all are equal."""
        loads = tuple(shard.load for shard in self.shards)
        return () if len(set(loads)) <= 1 else loads


def plan_job(
    hosts: Sequence[Host],
    *,
    devices_per_host: Sequence[str],
    channels: int,
    with_server: bool = True,
) -> JobPlan:
    """Give each working host one worker per device and each serving host `channels` shards.

    Working hosts have no shards, whatever their role, where as many hosts only serve: the traffic
    of each of those is then less than a worker's. Where all hosts are this machine, shards take
    free ports.

    Args:
        hosts: in the order of their ids, as `read_machinefile` returns them; at least one that
            works.
        devices_per_host: the devices of every working host, as `devices_from_flag` returns them,
            save of those with `gpus` or `workers` of their own.
        channels: shards per serving host (`--shards`), 1 to 1024.
        with_server: whether the job has shards at all.

    Raises:
        UsageError: no host that works, a number of CPU workers for a host of GPUs, an illegal
            number of channels, or several workers and no host for their shards.
    """
    if not any(host.works for host in hosts):
        raise UsageError("a job needs at least one client with workers")
    if not 1 <= channels <= 1024:
        raise UsageError(f"--shards must be from 1 to 1024, not {channels}")
    working = [host for host in hosts if host.works]
    devices = [_devices_of(host, tuple(devices_per_host)) for host in working]
    places = [(host, device) for host, own in zip(working, devices, strict=True) for device in own]
    seats = Seats([len(own) for own in devices])
    workers = tuple(
        WorkerPlan(host=host, seat=seats.of(rank), device=device)
        for rank, (host, device) in enumerate(places)
    )
    shards = _plan_shards(hosts, channels) if with_server else ()
    if with_server and len(working) > 1 and not shards:
        raise UsageError(
            f"every client has role=worker, but {len(working)} clients need shards; give a client "
            "role=server or role=both"
        )
    return JobPlan(hosts=tuple(hosts), workers=workers, shards=shards)


def _plan_shards(hosts: Sequence[Host], channels: int) -> tuple[ShardPlan, ...]:
    """Return the shards of all hosts whose load is not 0."""
    home_of: dict[int, int] = {}
    for host in hosts:
        dedicated = sum(home < 0 for home in home_of.values())
        home_of[host.id] = len(home_of) - dedicated if host.works else -1 - dedicated
    working = sum(host.works for host in hosts)
    both = sum(host.role is HostRole.BOTH for host in hosts)
    with_worker, alone = best_loads(working, len(hosts) - working, sharing=both)
    load_of = {HostRole.BOTH: with_worker, HostRole.SERVER: alone, HostRole.WORKER: 0}
    serving = [host for host in hosts if load_of[host.role]]
    fixed_ports = has_remote_hosts(hosts)
    return tuple(
        ShardPlan(
            index=position * channels + channel,
            host=host,
            channel=channel,
            address=_shard_address(host, channel, fixed_ports),
            home=home_of[host.id],
            load=load_of[host.role],
        )
        for position, host in enumerate(serving)
        for channel in range(channels)
    )


def best_loads(workers: int, servers: int, *, sharing: int | None = None) -> tuple[int, int]:
    """Return the relative load of a working host's shards and of a serving host's, in smallest
    whole numbers.

    With n working machines, b of which have shards too, and k that only serve, a part w of the
    model on each of the b and s on each of the k, the bytes that an iteration brings to a link are,
    in models (sent and received),

        worker and shards  2 (1 + w (n - 2))       worker alone  2       shards alone  2 n s

    and b w + k s = 1. The largest of them is least where the first and the last are equal:

        w = (n - k) / (b n + k (n - 2))            s = (b + n - 2) / (b n + k (n - 2))

    which with b = n is BytePS's optimum, w = (n - k) / (n n + k n - 2 k), s = 2 (n - 1) / (n n + k
    n - 2 k) (OSDI 2020, section 4.1). With k >= n the servers alone suffice, and w = 0.

    Args:
        workers: n, machines with workers; at least 1.
        servers: k, machines with shards only.
        sharing: b, those working machines that have shards too; None: all.

    Returns:
        The two loads; 0 where such a machine is to have no shards, or there is no such machine.
    """
    both = workers if sharing is None else sharing
    if servers == 0:
        return (1, 0) if both else (0, 0)
    if servers >= workers or both == 0:
        return (0, 1)
    working, serving = workers - servers, both + workers - 2
    divisor = gcd(working, serving)
    return (working // divisor, serving // divisor)


def devices_from_flag(
    gpu: str, *, count_gpus: Callable[[], int | None] = lambda: None
) -> tuple[str, ...]:
    """Parse the devices of `--gpu`.

    Args:
        gpu: empty or `cpu` for one CPU worker; else device numbers, `0,1`; or `all`, as in Caffe.
        count_gpus: returns how many GPUs there are, or None where that is not known; `all` needs
            it. It is not called for workers on the CPU: counting imports torch.

    Returns:
        `("cpu",)`, or `("cuda:0", "cuda:1")`, in the order given.

    Raises:
        UsageError: not a list of numbers, a number twice, or a GPU that is not there.
    """
    text = gpu.strip().lower()
    if text in ("", "cpu"):
        return ("cpu",)
    available = count_gpus()
    if text == "all":
        if available is None:
            raise UsageError(
                "--gpu=all cannot be used with other machines; give numbers, such as --gpu=0,1"
            )
        if not available:
            raise UsageError(
                "--gpu=all: no GPU was found on this machine; leave --gpu out to use the CPU"
            )
        return tuple(f"cuda:{number}" for number in range(available))
    texts = [number.strip() for number in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,4}", number, re.ASCII) for number in texts):
        raise UsageError(
            f"--gpu must be 'all' or device numbers parted by commas ('0,1'), not '{gpu}'"
        )
    numbers = [int(number) for number in texts]
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"--gpu={gpu} lists a device twice; each worker needs its own device")
    if available is not None and max(numbers) >= available:
        found = (
            f"0 to {available - 1} are"
            if available > 1
            else "only 0 is"
            if available
            else "none is"
        )
        remedy = "" if available else "; leave --gpu out to use the CPU"
        raise UsageError(
            f"--gpu={gpu}: there is no GPU {max(numbers)}; {found} on this machine{remedy}"
        )
    return tuple(f"cuda:{number}" for number in numbers)


def _devices_of(host: Host, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Return the devices of a host: its own, else the usual ones."""
    if host.gpus not in (None, "cpu"):
        return devices_from_flag(host.gpus)
    if host.gpus == "cpu" or usual[0] == "cpu":
        return ("cpu",) * (host.workers or len(usual))
    if host.workers is not None:
        raise UsageError(
            f"client {host.id} on {host.name} has {counted(host.workers, 'worker')} on the CPU "
            f"(workers=, or a worker for each task), but the job runs on {','.join(usual)}; give "
            "it gpus= with as many devices, or use gpus=cpu or --gpu=cpu"
        )
    return usual


def _shard_address(host: Host, channel: int, fixed_ports: bool) -> str:
    port = host.port + channel if host.port and fixed_ports else 0
    return f"tcp://{host.socket_address}:{port}"
