"""`poseidon extract_features`: features of a trained net into databases, by the words of Caffe's tool or as a job.

poseidon extract_features net.caffemodel net.prototxt fc7,fc8 features7,features8 100 lmdb GPU 0
poseidon extract_features --model=net.prototxt --weights=net.caffemodel --extract_feature_blob_names=fc7 \\
    --save_feature_dataset_names=examples/_temp/features --hostfile=machinefiles/localserver
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch

from poseidon import log
from poseidon.cli.net_flags import one_device, weight_files
from poseidon.cli.progress import progress_bar
from poseidon.cluster.jobs.registry import EXTRACTION, new_job_id
from poseidon.cluster.local import LocalLauncher
from poseidon.cluster.plan import JobPlan, ShardPlan, WorkerPlan, devices_from_flag, plan_job
from poseidon.cluster.process import ProcessSpec
from poseidon.cluster.supervision.loop import run_job
from poseidon.cluster.supervision.settings import SupervisionSettings
from poseidon.data.databases.kinds import Backend
from poseidon.data.databases.leveldb_cursor import require_leveldb
from poseidon.data.databases.writer import refuse_existing
from poseidon.engine.tools.extraction import Extraction
from poseidon.engine.tools.extractor import run_extraction
from poseidon.engine.tools.preflight import obstacle_to
from poseidon.errors import DataError, JobError, UsageError
from poseidon.launch.closing import near
from poseidon.launch.job import counted
from poseidon.launch.job_flags import START_TIMEOUT_S
from poseidon.launch.site import child_environment, read_clients, register_job, require_near
from poseidon.launch.terminal import Terminal
from poseidon.layers.user_modules import import_modules, module_names
from poseidon.net.compile import plan_phase
from poseidon.proto.caffe_pb2 import TEST, NetState
from poseidon.proto.definition import read_net
from ps_server.numerics import prepare_process

CAFFES_WORDS = "WEIGHTS NET BLOBS DATABASES NUM_MINI_BATCHES DB_TYPE [CPU/GPU] [DEVICE_ID]"
NEEDED = ("model", "weights", "extract_feature_blob_names", "save_feature_dataset_names")


def run(arguments: argparse.Namespace) -> int:
    """Extract; 0 when every database is in place.

    Raises:
        PoseidonError: a mistake in the words, the definition or the data, or the job failed.
    """
    if arguments.words_of_caffe:
        if any(getattr(arguments, name) for name in NEEDED):
            raise UsageError("give either Caffe's words or flags, not both")
        return _run_alone(
            replace(from_words(arguments.words_of_caffe), imports=module_names(arguments.imports))
        )
    for name in NEEDED:
        if not getattr(arguments, name):
            raise UsageError(f"--{name} is missing; or give Caffe's words: {CAFFES_WORDS}")
    return _run_job(arguments)


def from_words(words: Sequence[str]) -> Extraction:
    """What Caffe's words ask for.

    Raises:
        UsageError: too few or too many of them, or one that is out of range.
        SnapshotError: there is no such model.
    """
    if not 6 <= len(words) <= 8:
        raise UsageError(f"{len(words)} words are given, expected {CAFFES_WORDS}")
    weights, model, blobs, databases, count, kind = words[:6]
    if not count.isdecimal() or int(count) < 1:
        raise UsageError(f"NUM_MINI_BATCHES is '{count}', expected 1 or more")
    mode = words[6] if len(words) > 6 else "CPU"
    number = words[7].removeprefix("DEVICE_ID=") if len(words) > 7 else "0"
    if mode not in ("CPU", "GPU"):
        raise UsageError(f"'{mode}' is neither CPU nor GPU")
    return Extraction(
        model=model,
        weights=tuple(map(str, weight_files(weights))),
        blobs=_names(blobs),
        databases=_names(databases),
        backend=kind.lower(),
        batches=int(count),
        device=str(one_device(number if mode == "GPU" else "")),
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _run_alone(extraction: Extraction) -> int:
    _check(extraction, [extraction.paths()])
    prepare_process()
    with log.setup(stream=sys.stderr), progress_bar() as report:
        run_extraction(extraction, lambda done, total, _: report("extracting", done, total))
    return 0


def _run_job(flags: argparse.Namespace) -> int:
    if flags.num_app_threads < 1:
        raise UsageError(f"--num_app_threads is {flags.num_app_threads}, expected 1 or more")
    clients = read_clients(flags.hostfile, channels=1)
    require_near(flags.hostfile, clients)
    devices = devices_from_flag(flags.gpu, available=torch.cuda.device_count())
    if devices == ("cpu",):
        devices *= flags.num_app_threads
    plan = plan_job(clients, devices_per_host=devices, channels=1, with_server=False)
    job = flags.job or new_job_id(
        f"{EXTRACTION}_{Path(flags.model).stem}", datetime.now(), secrets.token_hex(3)
    )
    output = Path(flags.output or Path("output") / job).absolute()
    common = Extraction(
        model=str(Path(flags.model).absolute()),
        weights=tuple(str(path.absolute()) for path in weight_files(flags.weights)),
        blobs=_names(flags.extract_feature_blob_names),
        databases=tuple(str(Path(name).absolute()) for name in _names(flags.save_feature_dataset_names)),
        backend=flags.backend,
        batches=flags.num_mini_batches,
        job=job,
        output=str(output),
        workers=plan.worker_count,
        clients=plan.working_hosts,
        local_workers=plan.workers_per_host,
        threads=max(1, (os.cpu_count() or 1) // plan.worker_count),
        imports=module_names(flags.imports),
    )
    extractions = {worker.rank: _share(common, worker) for worker in plan.workers}
    _check(common, [extraction.paths() for extraction in extractions.values()])
    obstacle = obstacle_to(output)
    if obstacle:
        raise UsageError(f"--output: nothing can be written to {output}: {obstacle}")
    output.mkdir(parents=True, exist_ok=True)
    return _supervise(plan, extractions, flags.hostfile, output)


def _share(common: Extraction, worker: WorkerPlan) -> Extraction:
    return replace(
        common,
        rank=worker.rank,
        client=worker.position,
        local_rank=worker.local_rank,
        device=worker.device,
    )


def _check(extraction: Extraction, paths: Sequence[Sequence[Path]]) -> None:
    """What can be said before any process starts or any data is opened."""
    import_modules(extraction.imports)
    plan_phase(read_net(extraction.model), NetState(phase=TEST))
    if Backend.parse(extraction.backend) is Backend.LEVELDB:
        require_leveldb()
    for path in (path for each in paths for path in each):
        refuse_existing(path)
        obstacle = obstacle_to(path.absolute().parent)
        if obstacle:
            raise DataError(f"{path} cannot be written: {obstacle}")


def _supervise(plan: JobPlan, extractions: dict[int, Extraction], hostfile: str | None, output: Path) -> int:
    first = extractions[0]
    terminal = Terminal(Path(first.model).stem, sys.stderr, on_started=lambda: None)
    terminal.say(
        f"job {first.job}: {counted(len(plan.hosts), 'client')}, {counted(plan.worker_count, 'worker')}; "
        f"logs in {near(output)}"
    )

    def spec(role: WorkerPlan | ShardPlan) -> ProcessSpec:
        assert isinstance(role, WorkerPlan)
        return ProcessSpec(
            name=role.process,
            argv=(
                sys.executable,
                "-m",
                "poseidon.engine.tools.extractor",
                "--job",
                first.job,
                "--rank",
                str(role.rank),
            ),
            environment=child_environment(extractions[role.rank].threads or os.cpu_count() or 1),
            first_line=extractions[role.rank].to_json(),
        )

    try:
        with register_job(first.job, hostfile, plan.hosts, output) as registration:
            run_job(
                plan,
                spec,
                LocalLauncher(),
                listener=terminal,
                settings=SupervisionSettings(start_timeout_s=START_TIMEOUT_S),
                registration=registration,
            )
    except JobError:
        _tell_ready(extractions, terminal, "is complete, and in the way of another try until it is removed")
        raise
    finally:
        terminal.close()
    _tell_ready(extractions, terminal, "is ready")
    return 0


def _tell_ready(extractions: Mapping[int, Extraction], terminal: Terminal, words: str) -> None:
    """Name the databases that are there."""
    for path in (path for extraction in extractions.values() for path in extraction.paths()):
        if path.exists():
            terminal.say(f"{path} {words}")
