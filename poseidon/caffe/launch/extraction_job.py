"""The job of `poseidon extract_features`: features of a trained net into databases, by workers
of this machine.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch

from poseidon.base.durable import obstacle_to
from poseidon.base.paths import short_path
from poseidon.caffe.data.cursor import refuse_existing
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.leveldb_cursor import require_leveldb
from poseidon.caffe.layers.registry import import_modules
from poseidon.caffe.net.compile import plan_phase
from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.caffe.proto.definition import read_net
from poseidon.caffe.tools.preflight import Extraction
from poseidon.cluster.dial.dialer import LocalDialer
from poseidon.cluster.job_plan import JobPlan, ShardPlan, WorkerPlan, devices_from_flag, plan_job
from poseidon.cluster.jobs.registry import EXTRACTION, new_job_id
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import ProcessSpec
from poseidon.cluster.supervision.loop import run_job
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.state import DEFAULT_SUPERVISION
from poseidon.errors import DataError, JobError, counted
from poseidon.exchange.membership import Membership
from poseidon.launcher.job import check_folder
from poseidon.launcher.job_folder import OUTPUT, output_folder, register_job
from poseidon.launcher.processes import worker_spec
from poseidon.launcher.request import ExtractionRequest
from poseidon.launcher.site import Site, read_hosts
from poseidon.launcher.terminal import Terminal
from ps_server.network import Network


def run_extraction_job(request: ExtractionRequest) -> int:
    """Extract features on all workers of a machinefile; return the exit code.

    Raises:
        PoseidonError: a mistake in the request, or the job failed.
    """
    plan = _plan(request)
    job = request.job or new_job_id(
        f"{EXTRACTION}_{request.model.stem}", datetime.now(), secrets.token_hex(3)
    )
    output = (request.output or OUTPUT / job).absolute()
    common = Extraction(
        model=str(request.model.absolute()),
        weights=tuple(str(path.absolute()) for path in request.weights),
        blobs=request.extract_feature_blob_names,
        databases=tuple(str(Path(name).absolute()) for name in request.save_feature_dataset_names),
        backend=request.backend,
        batches=request.num_mini_batches,
        job=job,
        output=str(output),
        member=Membership(network=Network(size=plan.worker_count), hosts=plan.workers_by_host),
        threads=max(1, (os.cpu_count() or 1) // plan.worker_count),
        imports=request.imports,
    )
    extractions = {worker.rank: _part(common, worker) for worker in plan.workers}
    check_extraction(
        common, [path for extraction in extractions.values() for path in extraction.paths()]
    )
    check_folder("output", output)
    with output_folder(output):
        return _supervise(plan, extractions, request, output)


def check_extraction(extraction: Extraction, databases: Sequence[Path]) -> None:
    """Check what can be checked before any process starts or any data is opened.

    Raises:
        PoseidonError: a mistake in the definition, or a database cannot be written.
    """
    import_modules(extraction.imports)
    definition = read_net(extraction.model)
    plan_phase(definition, definition.state(TEST))
    if Backend.parse(extraction.backend) is Backend.LEVELDB:
        require_leveldb()
    for path in databases:
        refuse_existing(path)
        obstacle = obstacle_to(path.absolute().parent)
        if obstacle:
            raise DataError(f"{path} cannot be written: {obstacle}")


def _plan(request: ExtractionRequest) -> JobPlan:
    hosts = read_hosts(request.hostfile, channels=1)
    require_local(request.hostfile, hosts)
    devices = devices_from_flag(request.gpu, count_gpus=torch.cuda.device_count)
    if devices == ("cpu",):
        devices *= request.workers
    return plan_job(hosts, devices_per_host=devices, channels=1, with_server=False)


def require_local(hostfile: str | None, hosts: tuple[Host, ...]) -> None:
    """Refuse other machines: this command starts its processes on this one only.

    Raises:
        JobError: a client is another machine.
    """
    for host in hosts:
        if not host.is_here:
            raise JobError(
                f"{hostfile}: client {host.id} is on {host.name}; this command works on "
                "this machine only (127.0.0.1, ::1, localhost)"
            )


def _part(common: Extraction, worker: WorkerPlan) -> Extraction:
    member = replace(common.member, network=replace(common.member.network, rank=worker.rank))
    return replace(common, member=member, device=worker.device)


def _supervise(
    plan: JobPlan, extractions: dict[int, Extraction], request: ExtractionRequest, output: Path
) -> int:
    first = extractions[0]
    terminal = Terminal(
        Path(first.model).stem, sys.stderr, on_started=lambda: None, progress=request.progress
    )
    terminal.print(
        f"job {first.job}: {counted(len(plan.hosts), 'client')}, "
        f"{counted(plan.worker_count, 'worker')}; logs in {short_path(output)}"
    )

    def spec(role: WorkerPlan | ShardPlan) -> ProcessSpec:
        assert isinstance(role, WorkerPlan)
        return worker_spec(role, extractions[role.rank])

    site = Site(plan.hosts, LocalDialer())
    try:
        with (
            register_job(first.job, request.hostfile, plan.hosts, output) as registration,
            SignalRequests(DEFAULT_SUPERVISION) as requests,
        ):
            site.begin(registration.record)
            run_job(
                plan,
                spec,
                site.start,
                listener=terminal,
                settings=DEFAULT_SUPERVISION,
                registration=registration,
                requests=requests,
            )
    except JobError:
        _report_databases(extractions, terminal, "is complete; remove it before you try again")
        raise
    finally:
        site.close()
        terminal.close()
    _report_databases(extractions, terminal, "is ready")
    return 0


def _report_databases(
    extractions: Mapping[int, Extraction], terminal: Terminal, verdict: str
) -> None:
    for path in (path for extraction in extractions.values() for path in extraction.paths()):
        if path.exists():
            terminal.print(f"{path} {verdict}")
