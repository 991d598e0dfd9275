"""A job on hosts that runs iterations when it is told to: DDP's or ours, behind one contract.

Law: a job that waits for its next round puts nothing on the links and does not use the processor, so that several jobs
may live on the same hosts and be measured by turns.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from benchmarks.testbed.control import Round, Workers
from benchmarks.testbed.hosts import Host
from benchmarks.testbed.links import INTERFACE
from benchmarks.testbed.processes import Processes
from benchmarks.testbed.worker_settings import WorkerSettings, write_settings

START_S = 180.0
"""How long the processes may take to import torch and to meet, all on few cores; also the limit of one round."""


class Job(Protocol):
    """A training job on hosts."""

    @property
    def name(self) -> str:
        """For people."""

    def round(self, iterations: int) -> list[Round]:
        """Run iterations on all workers; what they took, by rank."""


class DdpJob:
    """torch's DistributedDataParallel over gloo, one worker on each host.

    Args:
        hosts: where.
        settings: what to train; the meeting place is filled in here.
        limit_s: how long the start or a round may take.
    """

    def __init__(self, hosts: Sequence[Host], settings: WorkerSettings, *, limit_s: float = START_S) -> None:
        self._hosts = hosts
        self._settings = settings
        self._limit_s = limit_s
        self._stack = ExitStack()

    @property
    def name(self) -> str:
        """`DDP`, with its buckets."""
        size = self._settings.bucket_mb
        return "DDP" if size is None else f"DDP {size:g} MB"

    def __enter__(self) -> DdpJob:
        with self._stack as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddp")))
            self._settings = replace(
                self._settings,
                workers=len(self._hosts),
                control=folder / "control",
                meeting_host=self._hosts[0].address,
                meeting_port=29400
                + (0 if self._settings.bucket_mb is None else int(self._settings.bucket_mb)),
            )
            write_settings(self._settings, folder / "settings.json")
            self._workers = stack.enter_context(Workers(self._settings.control, len(self._hosts)))
            self._processes = stack.enter_context(Processes(folder))
            for host in self._hosts:
                self._start(host, folder)
            self._workers.await_all(self._limit_s, self._processes.check)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stack.close()

    def round(self, iterations: int) -> list[Round]:
        """See `Job`."""
        return self._workers.round(iterations)

    def _start(self, host: Host, folder: Path) -> None:
        argv = [sys.executable, "-m", "benchmarks.testbed.ddp_worker"]
        argv += ["--settings", str(folder / "settings.json"), "--rank", str(host.index)]
        self._processes.start(
            f"{self.name} {host.index}", argv, host=host, extra={"GLOO_SOCKET_IFNAME": INTERFACE}
        )
