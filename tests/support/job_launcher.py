"""A launcher of a job with idle processes, for tests that kill it.

    python -m tests.support.job_launcher STATE_FOLDER JOB HOSTFILE

Prints one JSON line with the pids of its processes, each on its own host, when the job runs. A
worker ends only when it is asked to, and goes on without its launcher. Other hosts are reached over
SSH, with what HOME holds for that.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import closing
from pathlib import Path

from poseidon.base.settings import read_settings
from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.dial.dialer import LocalDialer, close_agents, opened
from poseidon.cluster.dial.ssh import SshDialer
from poseidon.cluster.job_plan import Role, ShardPlan, WorkerPlan, plan_job
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registration, Registry
from poseidon.cluster.machinefile import Host, SshSettings, has_remote_hosts, read_machinefile
from poseidon.cluster.process import Listener, ProcessSpec, creation
from poseidon.cluster.python_command import LauncherEnvironment
from poseidon.cluster.supervision.background import StartReport
from poseidon.cluster.supervision.loop import JobListener, run_job
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.state import SupervisionSettings
from poseidon.errors import JobError
from tests.support.job_child import ENDLESS_WORKER, SHARD, child

ROOT = Path(__file__).parents[2]


class Reporter(JobListener):
    """Prints a line when the job runs."""

    def __init__(self, registry: Registry, job: str, report: StartReport) -> None:
        self._registry = registry
        self._job = job
        self._report = report

    def on_started(self) -> None:
        record = self._registry.read(self._job)
        assert record is not None
        print(json.dumps([process.pid for process in record.processes]), flush=True)
        self._report.started()


def main(state_folder: Path, job: str, hostfile: Path) -> int:
    report = StartReport(read_settings().status_fd)
    clients = read_machinefile(hostfile)
    record = JobRecord(
        job=job,
        launcher=RecordedProcess(
            name="the launcher", host="127.0.0.1", pid=os.getpid(), created=creation(os.getpid())
        ),
        hostfile=str(hostfile.resolve()),
        hosts=clients,
        output="/nowhere",
        started_s=time.time(),
    )
    registry = Registry(state_folder)

    def make_spec(role: WorkerPlan | ShardPlan) -> ProcessSpec:
        script = SHARD if role.process.role is Role.SHARD else ENDLESS_WORKER
        return ProcessSpec(name=role.process, argv=child(script, "--job", job), first_line=b"{}")

    try:
        with (
            Registration(registry, record) as registration,
            closing(Agents(record)) as agents,
            SignalRequests(SupervisionSettings()) as requests,
        ):
            run_job(
                plan_job(clients, devices_per_host=("cpu",), channels=1),
                make_spec,
                agents.start,
                listener=Reporter(registry, job, report),
                settings=SupervisionSettings(),
                registration=registration,
                requests=requests,
            )
    except JobError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        report.failed(str(error), error.exit_code)
        return error.exit_code
    return 0


class Agents:
    """A launcher with an agent on each host, over SSH if a host is remote."""

    def __init__(self, record: JobRecord) -> None:
        remote = has_remote_hosts(record.hosts)
        here = LauncherEnvironment(python=sys.executable, checkout=str(ROOT), folder=os.getcwd())
        dialer = SshDialer(SshSettings(), here) if remote else LocalDialer()
        outcomes = dialer.dial(record.hosts, record.job)
        self._agents = opened(outcomes)
        failed = [outcome for outcome in outcomes.values() if isinstance(outcome, JobError)]
        if failed:
            self.close()
            raise failed[0]
        for agent in set(self._agents.values()) if remote else ():
            agent.register(record)

    def start(self, spec: ProcessSpec, host: Host, listener: Listener) -> RemoteProcess:
        """Start a process."""
        return self._agents[host.id].start(spec, listener)

    def close(self) -> None:
        """End all agents."""
        close_agents(self._agents.values())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
