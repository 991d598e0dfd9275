"""A harness that runs a case on hosts that are network namespaces, and reads what the page says
about it.

Law: a case ends with the job's last process, and with everything that was injected undone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.bottleneck_cases.cases import Case, Injected
from benchmarks.bottleneck_cases.definitions import LAYERS, MODULE, SOLVER, write_pictures
from benchmarks.testbed import links
from poseidon.observe.dashboard.bottleneck import Bottleneck, JobLimit
from poseidon.observe.dashboard.folders import JobFolder
from tests.support.ssh_hosts import SshHost, SshHosts, clean_environment

START_LIMIT_S = 90.0
END_LIMIT_S = 30.0
QUOTAS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 100_000
STOP_S = 0.1
"""A shard that is stopped and continued in turn does both once in so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the page says about a case.

    Attributes:
        found: at the end of the time.
        named_s: seconds after which the page named what was injected, and went on to; None: not at
            the end.
        start_s: seconds from the command to the first iteration.
    """

    found: Bottleneck
    named_s: float | None = None
    start_s: float = 0.0


class BottleneckHarness:
    """Runs cases on hosts, one after another.

    Args:
        hosts: one for each client of the largest case, and the launcher's.
        measured_s: seconds from the first iteration to the answer.
        kept: a folder for the metrics and logs of the jobs; None: they are removed with the hosts.
    """

    def __init__(self, hosts: SshHosts, measured_s: float, kept: Path | None = None) -> None:
        self._hosts, self._desk = hosts[: len(hosts) - 1], hosts[len(hosts) - 1]
        self._measured_s, self._kept = measured_s, kept
        pictures = self._desk.outside("/root/pictures")
        pictures.mkdir()
        write_pictures(pictures)
        for host in hosts:
            host.outside(f"/root/{MODULE}.py").write_text(LAYERS, encoding="ascii")
            if host is not self._desk:
                shutil.copytree(pictures, host.outside("/root"), dirs_exist_ok=True)
        shutil.copytree(pictures, self._desk.outside("/root"), dirs_exist_ok=True)

    def run(self, number: int, case: Case, watch: Callable[[Path], None] | None = None) -> Answer:
        """Run a case to its answer.

        Args:
            number: of the case, for names.
            case: to run.
            watch: called with the job's output folder at the end of the time, while the job runs.
        """
        job, began_s = f"case-{os.getpid()}-{number}", time.monotonic()
        for part in ("net.prototxt", "solver.prototxt", "machines"):
            self._desk.outside(f"/root/{part}").write_text(self._text(part, case), encoding="ascii")
        output = self._desk.outside(f"/root/{job}")
        with contextlib.ExitStack() as stack:
            stack.callback(self._keep, number, job)
            launcher = stack.enter_context(self._launcher(job, case))
            folder = JobFolder(output, output.name)
            if not self._trains(folder, launcher):
                return Answer(
                    found=Bottleneck(
                        cause=JobLimit.UNKNOWN, sentence=f"No job: {self._last_line(job)}"
                    )
                )
            start_s, training_s = time.monotonic() - began_s, time.monotonic()
            stack.enter_context(self._injected(case, job))
            found, named_s = self._watch(folder, case, training_s)
            if watch is not None:
                watch(output)
        return Answer(found=found, named_s=named_s, start_s=start_s)

    def _text(self, part: str, case: Case) -> str:
        if part == "machines":
            lines = [
                f"{number} host{number} 0 role={role.value}\n"
                for number, role in enumerate(case.roles)
            ]
            return "".join(lines)
        return SOLVER if part == "solver.prototxt" else case.shape.net()

    @contextlib.contextmanager
    def _launcher(self, job: str, case: Case) -> Iterator[subprocess.Popen[bytes]]:
        """Run a job, and wait for its end on all hosts."""
        words = [
            sys.executable,
            "-m",
            "poseidon",
            "train",
            "--solver=solver.prototxt",
            "--hostfile=machines",
        ]
        words += [
            f"--job={job}",
            f"--output={job}",
            f"--exchange={case.exchange}",
            *case.flags,
            "--threads=1",
        ]
        words += [f"--workers={case.workers}"]
        with self._desk.outside(f"/root/{job}.log").open("wb") as log:
            launcher = subprocess.Popen(
                self._desk.command(words),
                env=clean_environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                yield launcher
            finally:
                self._end(job, launcher)

    def _end(self, job: str, launcher: subprocess.Popen[bytes]) -> None:
        for _ in range(2):  # the second request ends the job at once
            for process in self._desk.processes_of(f"--job={job}"):
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        try:
            launcher.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
        end_s = time.monotonic() + END_LIMIT_S
        while time.monotonic() < end_s and any(host.processes() for host in self._hosts):
            time.sleep(0.1)

    def _trains(self, folder: JobFolder, launcher: subprocess.Popen[bytes]) -> bool:
        """Wait for the first iteration; return whether it came."""
        end_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end_s and launcher.poll() is None:
            folder.refresh()
            if "loss" in folder.view.series:
                return True
            time.sleep(0.1)
        return False

    def _watch(
        self, folder: JobFolder, case: Case, training_s: float
    ) -> tuple[Bottleneck, float | None]:
        """Read the page's sentence until the time is over; return the last, and since when it
        was right.
        """
        named_s: float | None = None
        while True:
            folder.refresh()
            found = _shown(folder)
            now_s = time.monotonic() - training_s
            named_s = (named_s or now_s) if case.is_named(found) else None
            if now_s >= self._measured_s:
                return found, named_s
            time.sleep(min(0.5, self._measured_s - now_s))

    def _keep(self, number: int, job: str) -> None:
        if self._kept is not None:
            place, output = self._kept / f"case_{number}", self._desk.outside(f"/root/{job}")
            place.mkdir(parents=True, exist_ok=True)
            if output.exists():  # the job was not refused
                shutil.copytree(output, place, dirs_exist_ok=True)
            shutil.copy(self._desk.outside(f"/root/{job}.log"), place / "launcher.log")

    def _last_line(self, job: str) -> str:
        lines = self._desk.outside(f"/root/{job}.log").read_text(encoding="utf-8").splitlines()
        return lines[-1] if lines else "the launcher printed nothing"

    @contextlib.contextmanager
    def _injected(self, case: Case, job: str) -> Iterator[None]:
        injected = case.injected
        with contextlib.ExitStack() as stack:
            for client in injected.shaped:
                name = self._hosts[client].network
                links.shape(name, injected.rate_mbit)
                stack.callback(links.unshape, name)
            if injected.slowed is not None:
                shard = _shard(self._hosts[injected.slowed], job)
                slow = _stopped_in_turn if injected.stopped else _with_quota
                stack.enter_context(slow(shard, injected))
            yield


def _shown(folder: JobFolder) -> Bottleneck:
    """Return what the page says limits a running job."""
    fields = folder.view.summary(time.time(), running=True)["bottleneck"]
    return Bottleneck(**{**fields, "cause": JobLimit(fields["cause"])})


def _shard(host: SshHost, job: str) -> psutil.Process:
    """Return the process of a host's shard."""
    found = [process for process in host.processes_of(job) if "--shard" in process.cmdline()]
    (shard,) = found
    return shard


@contextlib.contextmanager
def _with_quota(process: psutil.Process, injected: Injected) -> Iterator[None]:
    """Give a process a part of a processor, by a control group."""
    group = QUOTAS / f"poseidon-case-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD_US * injected.part)))
        (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        with contextlib.suppress(OSError):  # it has ended
            (QUOTAS / "cgroup.procs").write_text(str(process.pid))
        group.rmdir()


@contextlib.contextmanager
def _stopped_in_turn(process: psutil.Process, injected: Injected) -> Iterator[None]:
    """Stop and continue a process in turn."""
    over = threading.Event()

    def work() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while not over.is_set():
                process.suspend()
                over.wait(STOP_S * (1 - injected.part))
                process.resume()
                over.wait(STOP_S * injected.part)

    thread = threading.Thread(target=work, name="stop-shard")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
