"""Whole jobs in one process: W workers as threads with real nets, readers, snapshots, shards
over memory or sockets.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.proto.caffe_pb2 import TRAIN
from poseidon.caffe.proto.definition import read_solver
from poseidon.caffe.snapshot.caffemodel import read_model
from poseidon.caffe.solver.checkpoint import Checkpoint
from poseidon.caffe.solver.display import Display
from poseidon.caffe.solver.replica import Replica
from poseidon.caffe.solver.settings import solver_settings
from poseidon.caffe.solver.tester import Tester
from poseidon.caffe.solver.trainer import LoopSettings, Trainer
from poseidon.engine.snapshot_files import SnapshotSettings
from poseidon.exchange.base import ExchangeSettings
from poseidon.exchange.build import build_exchange
from poseidon.exchange.compute_options import DEFAULT_COMPUTE, ComputeOptions
from poseidon.exchange.device import TYPES
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions, Scheme
from poseidon.exchange.replicas import NO_CHECK
from poseidon.observe.metrics.glog_lines import GlogSink
from poseidon.observe.metrics.record import TestRecord, TrainRecord
from ps_server.network import Network
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.support.cluster import TIMEOUT_S, TOKEN, Addresses, job_addresses, memory_store
from tests.support.cluster import Connect as ClientOfRank
from tests.support.exchanges import AloneExchange, plain_exchange, plain_store
from tests.support.threads import on_threads

SMALL_NET = """
name: "small"
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN }
  transform_param { scale: 0.01 mean_value: 128 mirror: true crop_size: 6 }
  data_param { source: "train_lmdb" backend: LMDB batch_size: %d shared_file_system: true } }
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TEST }
  transform_param { scale: 0.01 mean_value: 128 crop_size: 6 }
  data_param { source: "test_lmdb" backend: LMDB batch_size: 5 shared_file_system: true } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "relu" type: "ReLU" bottom: "pool" top: "pool" }
%s
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip" inner_product_param { num_output: 10
  weight_filler { type: "gaussian" std: 0.1 } } }
layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
NORM = """
layer { name: "norm" type: "BatchNorm" bottom: "pool" top: "norm" batch_norm_param { moving_average_fraction: 0.9 } }
layer { name: "scale" type: "Scale" bottom: "norm" top: "pool2" scale_param { bias_term: true } }
layer { name: "again" type: "ReLU" bottom: "pool2" top: "pool2" }
layer { name: "back" type: "Eltwise" bottom: "pool" bottom: "pool2" top: "sum" }
layer { name: "ip0" type: "InnerProduct" bottom: "sum" top: "ip0" inner_product_param { num_output: 10
  weight_filler { type: "gaussian" std: 0.1 } } }
layer { name: "loss0" type: "SoftmaxWithLoss" bottom: "ip0" bottom: "label" top: "loss0" }
"""
DROPOUT = 'layer { name: "drop" type: "Dropout" bottom: "pool" top: "pool" }'
SOLVER = """
net: "net.prototxt" base_lr: 0.1 lr_policy: "inv" gamma: 0.01 power: 0.75 momentum: 0.9 weight_decay: 0.004
test_iter: 5 test_interval: 8 display: 4 average_loss: 3 random_seed: 3 snapshot_prefix: "snap" snapshot: 0
"""


def write_definitions(
    folder: Path,
    *,
    batch: int,
    extra: str = "",
    dropout: bool = False,
    norm: bool = False,
    smooth: bool = False,
) -> Path:
    """Write a small net and its solver to `folder`; fields in `extra` take precedence.

    Args:
        folder: to write to.
        batch: of a worker.
        extra: more fields of the solver.
        dropout: with dropout.
        norm: with batch normalization.
        smooth: averages and tanh in place of maxima and ReLU, where a rounding difference, which
            differs from one processor to the next, can turn a near tie the other way and is then
            none any more.
    """
    net = SMALL_NET % (batch, (DROPOUT if dropout else "") + (NORM if norm else ""))
    if smooth:
        net = net.replace("pool: MAX", "pool: AVE").replace('"ReLU"', '"TanH"')
    (folder / "net.prototxt").write_text(net, encoding="utf-8")
    given = {line.split(":")[0].strip() for line in extra.splitlines()}
    text = SOLVER
    for name in given:
        text = _without(text, name)
    solver = folder / "solver.prototxt"
    solver.write_text(text + extra + "\n", encoding="utf-8")
    return solver


def _without(text: str, name: str) -> str:
    words = text.split()
    kept = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word == f"{name}:":
            skip = True
        else:
            kept.append(word)
    return " ".join(kept) + "\n"


@dataclass(slots=True)
class RecordingSink:
    """A sink that records."""

    train: list[TrainRecord] = field(default_factory=list)
    tests: list[TestRecord] = field(default_factory=list)

    def on_train(self, record: TrainRecord) -> None:
        self.train.append(record)

    def on_test(self, record: TestRecord) -> None:
        self.tests.append(record)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job to run.

    `at(iteration, exchange)` is called on rank 0 after each iteration. With a `kind`, the exchange
    is the one that a job of true processes has, over sockets; without, all tensors go to the
    server. `spoils` is a rank and an iteration after which a weight of that rank changes by itself;
    the replicas are compared as `options` ask for. `stop_wanted` is asked by rank 0 in tests.
    `bounds` are the bounds of virtual workers; empty: one for each worker.
    """

    workers: int = 1
    shards: int = 0
    staleness: int = 0
    kind: ExchangeKind | None = None
    resume: Path | None = None
    at: Callable[[int, Exchange], None] | None = None
    stop_wanted: Callable[[], bool] = lambda: False
    options: ExchangeOptions = NO_CHECK
    spoils: tuple[int, int] | None = None
    saving: SnapshotSettings = field(default_factory=SnapshotSettings)
    bounds: tuple[int, ...] = ()
    compute: ComputeOptions = DEFAULT_COMPUTE

    @property
    def placement(self) -> VirtualWorkers | None:
        """The virtual workers; None: one for each worker."""
        return VirtualWorkers(self.bounds) if self.bounds else None


@dataclass(slots=True)
class Ended:
    """The result: rank 0's records, each rank's last iteration, how many tensors travelled as
    factors, the local steps of a round, and the schemes that were measured.
    """

    sink: RecordingSink = field(default_factory=RecordingSink)
    iterations: dict[int, int] = field(default_factory=dict)
    by_factors: int = 0
    local_steps: int = 0
    schemes: tuple[Scheme, ...] = ()


def run(solver_path: Path, job: Job) -> Ended:
    """Train. Raise the first failure of any worker."""
    ended = Ended()
    with ExitStack() as stack:
        connect: ClientOfRank | Addresses | None = None
        if job.kind is not None:
            connect = stack.enter_context(job_addresses(job.kind, job.workers, job.shards))
        elif job.shards:
            connect = stack.enter_context(memory_store(job.workers, job.shards))

        on_threads(job.workers, lambda rank: _run_worker(solver_path, job, rank, connect, ended))
    return ended


def _exchange(
    replica: Replica,
    settings: ExchangeSettings,
    job: Job,
    rank: int,
    connect: ClientOfRank | Addresses | None,
    ended: Ended,
    schemes: Sequence[Scheme] = (),
) -> Exchange:
    if connect is None:
        return AloneExchange(replica.trained, settings)
    if job.kind is None:
        store = plain_store(
            replica.trained,
            settings,
            replica.member,
        )
        return plain_exchange(connect(rank, store), replica.trained, store, settings)
    member = replica.member
    assert isinstance(connect, Addresses)
    built = build_exchange(replica.trained, settings, member, connect.of(rank), schemes=schemes)
    if built.recorded:
        ended.schemes = tuple(choice.scheme for choice in built.plan.choices)
    ended.by_factors = len(built.plan.of(Scheme.FACTORS))
    ended.local_steps = built.plan.local_steps
    return built.exchange


def _run_worker(
    path: Path, job: Job, rank: int, connect: ClientOfRank | Addresses | None, ended: Ended
) -> None:
    solver = read_solver(path)
    settings = solver_settings(solver)
    context = LayerContext(
        phase=TRAIN,
        seed=settings.random_seed or 1,
        autocast=TYPES.get(job.compute.precision),
        channels_last=job.compute.channels_last,
    )
    member = Membership(
        network=Network(rank=rank, size=job.workers, token=TOKEN, timeout_s=TIMEOUT_S),
        shards=job.shards,
        virtual_workers=job.placement,
        options=replace(job.options, kind=job.kind or job.options.kind, staleness=job.staleness),
    )
    replica = Replica(solver, settings, context, member)
    checkpoint = Checkpoint(replica, solver.snapshot_prefix(), settings=job.saving)
    state = None
    if job.resume is not None:
        state = checkpoint.restore(job.resume)
        replica.load([state["model"]], own=True)
    common = ExchangeSettings(
        clip=settings.clip,
        gradient_scale=1 / settings.iter_size,
        start_clock=0 if state is None else state["iteration"],
    )
    schemes = [] if state is None else list(map(Scheme, state.get("schemes", ())))
    exchange = _exchange(replica, common, job, rank, connect, ended, schemes)
    try:

        def after(iteration: int) -> None:
            if rank == 0 and job.at is not None:
                job.at(iteration, exchange)
            if job.spoils == (rank, iteration):
                index = next(i for i, t in enumerate(replica.trained) if t.name.startswith("ip"))
                exchange.wait(index)  # until the next iteration the tensor is this thread's
                replica.trained[index].tensor.detach().view(-1)[3] += 1.0

        log = GlogSink(logging.getLogger("poseidon.test"))
        trainer = Trainer(
            replica,
            exchange,
            LoopSettings(
                title="small",
                on_progress=after,
                local_steps=ended.local_steps,
                schemes=ended.schemes,
            ),
            checkpoint=checkpoint,
            testers=[
                Tester(replica, index, exchange, stop_wanted=job.stop_wanted)
                for index in range(len(replica.tests))
            ],
            display=Display(replica, exchange.control, log, [ended.sink]),
        )
        try:
            trainer.open(state, job.resume)
            trainer.run()
        finally:
            trainer.close()
        ended.iterations[rank] = trainer.iteration
    finally:
        exchange.close()
        replica.close()


def weights(folder: Path, iteration: int) -> list[np.ndarray]:
    """Return all blobs of a snapshot."""
    saved = read_model(folder / f"snap_iter_{iteration}.caffemodel")
    return [array for _, arrays in saved for array in arrays]


def largest_difference(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """Return the largest difference of any weight, relative to the largest weight of its blob."""
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in zip(a, b, strict=True))


def endless(folder: Path) -> Path:
    """Return a solver that does not end by itself."""
    solver = write_definitions(folder, batch=5, extra="max_iter: 1000000\ndisplay: 1")
    text = re.sub(r"test_(iter|interval): \d+", "", solver.read_text(encoding="utf-8"))
    solver.write_text(text, encoding="utf-8")
    return solver
