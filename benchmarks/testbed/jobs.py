"""A job on hosts that runs iterations on request: DDP's or ours.

Law: a job that waits for its next round uses neither links nor processors, so several jobs may
share the hosts and be measured by turns.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from benchmarks.testbed.computed import COMPUTED
from benchmarks.testbed.control import Round, Workers
from benchmarks.testbed.errors import TestbedError
from benchmarks.testbed.hooks import PLAIN_ITERATIONS, Hook
from benchmarks.testbed.hosts import Host
from benchmarks.testbed.processes import CpuTime, Processes
from benchmarks.testbed.template import Template
from benchmarks.testbed.worker_settings import (
    DdpSettings,
    PoseidonSettings,
    TrainingSettings,
    WorkerSettings,
    write_settings,
)
from poseidon.exchange.options import ExchangeKind
from ps_server.keys import JobKeys, write_keyring

LIMIT_S = 300.0
"""Limit of the start, in which all processes import torch and connect on few cores; also of one
round.
"""
FIRST_PORT = 9000

_PORTS = itertools.count(FIRST_PORT, 10)


class HostJob:
    """A job with one worker on each host, or on the first of them.

    Args:
        hosts: the hosts.
        training: the training.
        how: the system.
        limit_s: limit of the start and of a round.
        template: forks the job's processes; None: they are started.

    Raises:
        TestbedError: on entering or in a round: too few hosts, or a process failed.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        training: TrainingSettings,
        how: DdpSettings | PoseidonSettings,
        *,
        limit_s: float = LIMIT_S,
        template: Template | None = None,
    ) -> None:
        servers = how.servers if isinstance(how, PoseidonSettings) else 0
        if len(hosts) <= servers:
            raise TestbedError(
                f"{len(hosts)} hosts of which {servers} only serve: expected one more to work"
            )
        if isinstance(how, DdpSettings) and how.alone:
            hosts = hosts[:1]
        self._hosts = hosts
        self._working = hosts[: len(hosts) - servers]
        self._serving = hosts[len(hosts) - servers :] if servers else self._working
        self._training = training
        self._how = how
        self._limit_s = limit_s
        self._template = template
        self._stack = ExitStack()
        self._losses: list[float] = []
        self._shards: list[str] = []
        self._shard_bytes: list[int] = []

    @property
    def name(self) -> str:
        """The name of the job in tables."""
        if isinstance(self._how, DdpSettings):
            size = self._how.bucket_mb
            if len(self._hosts) == 1:
                return "one process"
            if self._how.hook.startswith("diloco"):
                return Hook.parse(self._how.hook).name
            hook = f" {Hook.parse(self._how.hook).name}" if self._how.hook else ""
            return f"DDP{hook}" if size is None else f"DDP{hook} {size:g} MB"
        words = [self._how.name]
        words += [f"{self._how.servers} servers"] if self._how.servers else []
        words += [] if self._how.wait_free else ["not wait-free"]
        words += ["in clear"] if self._how.in_clear else []
        return " ".join(words)

    @property
    def period(self) -> int:
        """Number of iterations after which the job's transfers repeat."""
        if isinstance(self._how, PoseidonSettings):
            return max(self._how.local_steps, 1)
        return Hook.parse(self._how.hook).period if self._how.hook else 1

    @property
    def overlaps(self) -> bool:
        """Whether the transfers of an iteration go on in the next one: not with an optimizer of the
        worker's, which needs the mean gradients, or at the end of a round of local steps the
        values.
        """
        computed = self._training.computed
        own_optimizer = bool(computed) and COMPUTED[computed].adamw
        return isinstance(self._how, PoseidonSettings) and not (
            own_optimizer and self._how.sync_delay == 0
        )

    @property
    def losses(self) -> list[float]:
        """The loss of each iteration so far, the mean over the workers."""
        return self._losses

    @property
    def plain_iterations(self) -> int:
        """Number of first iterations that differ from all later ones."""
        if isinstance(self._how, PoseidonSettings):
            return max(map(int, re.findall(r":start=(\d+)", self._how.compress)), default=0)
        return PLAIN_ITERATIONS if self._how.hook else 0

    def __enter__(self) -> HostJob:
        with self._stack as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="testbed")))
            settings = self._settings(folder)
            write_settings(settings, folder / "settings.json")
            self._workers = stack.enter_context(Workers(settings.control, len(self._working)))
            self._processes = stack.enter_context(Processes(folder, self._template))
            if settings.encrypted:
                _write_keys(settings)
            self._start_shards(settings, folder)
            self._start_workers(folder)
            self._workers.await_all(self._limit_s, self._processes.check)
            stack.push(self._let_go)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, where)

    def round(self, iterations: int) -> list[Round]:
        """Run iterations on all workers. Return their times, by rank.

        Raises:
            TestbedError: a process failed.
        """
        try:
            found = self._workers.round(iterations)
        except TestbedError:
            self._processes.check()  # its error says more
            raise
        self._losses += map(statistics.fmean, zip(*(each.losses for each in found), strict=True))
        return found

    def shard_times(self) -> list[CpuTime]:
        """Return each shard's processor seconds so far; none for DDP."""
        return [self._processes.cpu_time(name) for name in self._shards]

    @property
    def shard_bytes(self) -> list[int]:
        """Return the bytes that each shard has received and sent since its start; after the job
        has ended.
        """
        return self._shard_bytes

    def _let_go(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._workers.close()
        if kind is not None:
            return  # an interrupted round is ended without waiting
        self._processes.await_end()
        for name in self._shards:
            done = [line for line in self._processes.output(name) if '"done"' in line]
            if done:
                counts = json.loads(done[-1])
                self._shard_bytes.append(counts["bytes_in"] + counts["bytes_out"])

    def _settings(self, folder: Path) -> WorkerSettings:
        shards, homes = [], []
        how = self._how
        several = len(self._hosts) > 1  # a single worker needs no server
        if several and isinstance(how, PoseidonSettings) and ExchangeKind(how.exchange).has_shards:
            port = next(_PORTS)
            for place, host in enumerate(self._serving):
                for channel in range(how.shards):
                    shards.append(f"tcp://{host.address}:{port + channel}")
                    homes.append(-1 - place if how.servers else place)
        return WorkerSettings(
            training=self._training,
            how=self._how,
            control=folder / "control",
            hosts=tuple(host.address for host in self._working),
            shards=tuple(shards),
            homes=tuple(homes),
            token=secrets.token_hex(16),
            port=next(_PORTS),
        )

    def _start_shards(self, settings: WorkerSettings, folder: Path) -> None:
        secret = folder / "token"
        secret.touch(mode=0o600)
        secret.write_text(settings.token, encoding="utf-8")
        per_host = len(settings.shards) // len(self._serving)
        for index, listen in enumerate(settings.shards):
            argv = ["--shard", str(index), "--listen", listen]
            argv += ["--workers", str(settings.workers), "--token-file", str(secret)]
            if settings.encrypted:
                argv += ["--keys", str(settings.keys_file("shard", index))]
            if isinstance(self._how, PoseidonSettings) and self._how.trace is not None:
                argv += ["--trace", str(self._how.trace / f"trace_shard_{index}.json")]
            name = f"{self.name} shard {index}"
            self._shards.append(name)
            host = self._serving[index // per_host]
            self._processes.start_module(name, "ps_server.__main__", argv, host=host)

    def _start_workers(self, folder: Path) -> None:
        module = "ddp_worker" if isinstance(self._how, DdpSettings) else "poseidon_worker"
        for rank, host in enumerate(self._working):
            argv = ["--settings", str(folder / "settings.json"), "--rank", str(rank)]
            self._processes.start_module(
                f"{self.name} worker {rank}", f"benchmarks.testbed.{module}", argv, host=host
            )


def _write_keys(settings: WorkerSettings) -> None:
    """Write the keys of all processes of a job, as `poseidon run` gives them."""
    keys = JobKeys.new(workers=settings.workers, shards=len(settings.shards))
    for rank in range(settings.workers):
        write_keyring(settings.keys_file("worker", rank), keys.of_worker(rank))
    for index in range(len(settings.shards)):
        write_keyring(settings.keys_file("shard", index), keys.of_shard(index))
