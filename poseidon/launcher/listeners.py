"""The listeners of a job in its launcher: straggler reports, the statistics file, logs of other
hosts.

Law: each listener knows nothing of the others; `Listeners` calls all of them in a fixed order. A
file that cannot be written is one warning and never ends a job.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from poseidon.base.durable import write_whole
from poseidon.base.text_files import OutputLine
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.machinefile import is_loopback
from poseidon.cluster.process import OutputStream
from poseidon.cluster.supervision.background import this_command
from poseidon.cluster.supervision.loop import JobListener
from poseidon.cluster.supervision.stragglers import Stragglers
from poseidon.exchange.auto.recorded import FILE_NAME as PLAN_FILE
from poseidon.observe.metrics.job_statistics import (
    FILE_NAME,
    GpuReading,
    JobStatistics,
    WorkerStatistics,
    encode_statistics,
    parsed,
)
from poseidon.observe.metrics.progress import JobProgress, ProgressMeter
from ps_server.statistics import ShardStatistics

REMOTE_LOGS = "from_hosts"
"""The folder, in a job's output folder, of the logs that come from other hosts."""
WRITE_EVERY_S = 1.0
PAGE_CLOSE_S = 5.0


class Listeners(JobListener):
    """Several listeners as one: each call goes to all of them, in the order in which they were
    given.

    A listener that raises ends the call, and so the job: those after it are not called.
    """

    def __init__(self, *listeners: JobListener) -> None:
        self._listeners = listeners

    def on_started(self) -> None:
        for listener in self._listeners:
            listener.on_started()

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        for listener in self._listeners:
            listener.on_event(name, event)

    def on_output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        for listener in self._listeners:
            listener.on_output(name, stream, text)

    def on_log(self, name: ProcessName, stream: OutputStream, line: OutputLine) -> None:
        for listener in self._listeners:
            listener.on_log(name, stream, line)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()


class StragglerReports(JobListener):
    """Reports a worker that becomes a straggler, and one that stops being one.

    Args:
        now: seconds, monotonic.
    """

    def __init__(
        self, report: Callable[[str], None], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._report = report
        self._now = now
        self._stragglers = Stragglers()

    def on_started(self) -> None:
        self._stragglers.forget()

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        if name.role is not Role.WORKER:
            return
        iteration, waited_s = event.get("iteration"), event.get("waited_s")
        if event.get("event") == "progress" and isinstance(iteration, int):
            turns = event.get("virtual_workers")
            self._stragglers.progress(name, iteration, turns if isinstance(turns, int) else 1)
        if event.get("event") == "alive" and isinstance(waited_s, int | float):
            sentence = self._stragglers.waited(name, float(waited_s), self._now())
            if sentence is not None:
                self._report(sentence)


class PlanFile(JobListener):
    """Keeps the plan that `--exchange=auto` or `hybrid` has chosen in `<output>/exchange_plan.json`."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._path = folder / PLAN_FILE
        self._warn = warn
        self.plan = ""
        """The text of the file, for the job's next start; empty: no worker has chosen yet."""

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        plan = event.get("plan")
        if event.get("event") != "exchange_plan" or not isinstance(plan, str) or self.plan:
            return
        self.plan = plan
        try:
            write_whole(self._path, plan.encode())
        except OSError as error:
            self._warn(_unwritten(self._path, error))


class StatisticsFile(JobListener):
    """Keeps the last statistics of each process of a start in `<output>/statistics.json`.

    Args:
        now: seconds, monotonic.
    """

    def __init__(
        self,
        job: str,
        folder: Path,
        warn: Callable[[str], None],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._path = folder / FILE_NAME
        self._warn = warn
        self._now = now
        self._written_s = float("-inf")
        self._workers: dict[int, WorkerStatistics] = {}
        self._shards: dict[int, ShardStatistics] = {}
        self._gpus: dict[int, GpuReading] = {}
        self._meter, self._progress = ProgressMeter(now), JobProgress()
        self._unwritten = False
        self._broken = False

    def on_started(self) -> None:
        """Forget the processes of the start before: this one may have fewer."""
        self._workers.clear()
        self._shards.clear()

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        if event.get("event") == "statistics":
            self._keep(name, event)
        gpu = parsed(GpuReading, event.get("gpu")) or GpuReading()
        if event.get("event") == "alive" and gpu != GpuReading():
            self._gpus[name.index] = gpu
        if event.get("event") == "progress" and name.role is Role.WORKER and name.index == 0:
            self._progress = self._meter.update(event) or self._progress
            self._unwritten = True

    def close(self) -> None:
        """Write what is not written yet."""
        if self._unwritten:
            self._write()

    def _keep(self, name: ProcessName, event: Mapping[str, object]) -> None:
        if name.role is Role.WORKER and (worker := parsed(WorkerStatistics, event)) is not None:
            self._workers[name.index] = worker
        elif name.role is Role.SHARD and (shard := parsed(ShardStatistics, event)) is not None:
            self._shards[name.index] = shard
        else:
            return
        self._unwritten = True
        if self._now() - self._written_s >= WRITE_EVERY_S:
            self._write()

    def _write(self) -> None:
        self._written_s, self._unwritten = self._now(), False
        workers, shards = dict(sorted(self._workers.items())), dict(sorted(self._shards.items()))
        progress = replace(self._progress, loss=None)
        text = encode_statistics(
            JobStatistics(
                job=self._job,
                workers=workers,
                shards=shards,
                gpus=dict(sorted(self._gpus.items())),
                progress=progress,
            )
        )
        try:
            write_whole(self._path, text.encode(), durably=False)
        except OSError as error:
            if not self._broken:
                self._warn(_unwritten(self._path, error))
            self._broken = True


class RemoteLogs(JobListener):
    """Keeps the lines that processes on other hosts write, a file for each process:
    `<output>/from_hosts/worker_1.log`.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder = folder / REMOTE_LOGS
        self._warn = warn
        self._files: dict[ProcessName, TextIO] = {}
        self._broken = False

    def on_log(self, name: ProcessName, stream: OutputStream, line: OutputLine) -> None:
        if is_loopback(name.host) or self._broken:
            return
        try:
            if name not in self._files:
                if not self._files:
                    self._folder.mkdir(exist_ok=True)
                path = self._folder / f"{name.short.replace(' ', '_')}.log"
                self._files[name] = path.open(
                    "a", encoding="utf-8", errors="backslashreplace", buffering=1
                )
            self._files[name].write(line.text + "\n")
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            _, file = self._files.popitem()
            try:
                file.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._broken:
            self._warn(_unwritten(self._folder, error))
        self._broken = True


class DashboardPage(JobListener):
    """Serves the job's page (`poseidon dashboard`) from a child process as long as the job runs.

    Args:
        show: takes the line with the address, or the reason why there is no page.
    """

    def __init__(self, folder: Path, show: Callable[[str], None]) -> None:
        self._show = show
        argv = this_command(["dashboard", str(folder), "--port=0"])
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._thread = threading.Thread(target=self._read, name="poseidon-dashboard", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self._process.stdout or ():
                self._show(line.rstrip())
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: the page is not part of the job
            self._show(f"warning: the dashboard's output cannot be read: {error}")

    def close(self) -> None:
        """End the page."""
        self._process.terminate()
        try:
            self._process.wait(PAGE_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(PAGE_CLOSE_S)


def _unwritten(path: Path, error: OSError) -> str:
    return f"warning: cannot write {path}: {error.strerror or error}; the job continues without it"
