#!/usr/bin/env python3
"""Measure the cost of heartbeats and of background snapshots with checksums in a training loop.

    python benchmarks/reliability_cost.py --blocks=8

One worker trains blocks of iterations. In each block every other iteration has the watchdog, and
the heartbeat thread runs; by turns a block has nothing more, or one snapshot in its middle:
written, checksummed and flushed in the background while the block goes on. Neighbouring iterations
are compared, since whole blocks lie percents apart.

The worker has the environment that a job gives its workers: malloc keeps what a snapshot has used
for the next one.

How to read it: seconds are processor time of all the process's threads, so what happens in the
background counts in full, as it would where no core is idle, and other programs disturb it little.
Medians over all iterations; a snapshot's is the median over blocks of what a block takes beyond as
many usual iterations.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import chain, pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import torch

from benchmarks.chaos_runs.definitions import RECORDS, write_pictures
from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.proto.caffe_pb2 import TRAIN
from poseidon.caffe.proto.definition import read_solver
from poseidon.caffe.solver.checkpoint import Checkpoint
from poseidon.caffe.solver.display import Display
from poseidon.caffe.solver.replica import Replica
from poseidon.caffe.solver.settings import solver_settings
from poseidon.caffe.solver.trainer import LoopSettings, Trainer
from poseidon.engine.heartbeat import Watchdog
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.exchange.alone import AloneCarrier
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.job_control import AloneControl
from poseidon.exchange.membership import Membership
from poseidon.launcher.processes import child_environment
from poseidon.observe.metrics.glog_lines import GlogSink

NET = """
name: "cost"
layer { name: "data" type: "Data" top: "data" top: "label"
  data_param { source: "train_lmdb" backend: LMDB batch_size: 32 shared_file_system: true } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 32 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "fc" type: "InnerProduct" bottom: "conv" top: "fc"
  inner_product_param { num_output: 1024 weight_filler { type: "xavier" } } }
layer { name: "out" type: "InnerProduct" bottom: "fc" top: "out"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "out" bottom: "label" top: "loss" }
"""
SOLVER = """
net: "net.prototxt" base_lr: 0.0001 lr_policy: "fixed" momentum: 0.9 random_seed: 1 display: 0
snapshot: %d snapshot_prefix: "snap" snapshot_after_train: false max_iter: %d
"""


WARM = 6
"""Iterations that are not counted; an even number, so that the first one counted is without the
watchdog.
"""


class Block(Enum):
    """The additions to a block."""

    BEATING = "heartbeats"  # the watchdog in every other iteration, and the thread that sends it
    ALL = "heartbeats and a snapshot"  # and one snapshot, in the background


class EveryOther(Exchange):
    """The exchange of one process, which a watchdog observes in odd iterations, and nothing in
    even ones.

    Args:
        tensors: of the exchange.
        watchdog: of the loop.
    """

    def __init__(self, tensors: Sequence[Trained], watchdog: Watchdog) -> None:
        carrier, settings = AloneCarrier(tensors, ExchangeSettings()), ExchangeSettings()
        super().__init__([carrier], AloneControl(), settings)
        self._observer = watchdog

    def start(self, iteration: int, rate: float) -> None:
        self.observe([self._observer] if iteration % 2 else [])
        super().start(iteration, rate)


def block_s(folder: Path, block: Block, iterations: int) -> list[float]:
    """Train a block; Return the seconds of each iteration after the warm-up, without the wait
    for the disk.
    """
    interval = iterations // 2 if block is Block.ALL else 0
    path = folder / "solver.prototxt"
    path.write_text(SOLVER % (interval, iterations - 1), encoding="ascii")
    solver = read_solver(path)
    settings = solver_settings(solver)
    replica = Replica(solver, settings, LayerContext(phase=TRAIN, seed=1), Membership())
    moments: list[float] = []

    def note(iteration: int) -> None:
        moments.append(time.process_time())

    log = GlogSink(logging.getLogger("poseidon.cost"))
    with _exchange(replica) as exchange:
        trainer = Trainer(
            replica,
            exchange,
            LoopSettings(title="cost", on_progress=note),
            checkpoint=Checkpoint(replica, solver.snapshot_prefix()),
            testers=[],
            display=Display(replica, exchange.control, log, []),
        )
        trainer.open(None)
        trainer.run()
        trainer.close()
    replica.close()
    return [after - before for before, after in pairwise(moments[WARM - 1 :])]


@contextmanager
def _exchange(replica: Replica) -> Iterator[Exchange]:
    launcher = LauncherConnection(io.StringIO(), io.StringIO())
    launcher.start()
    launcher.heartbeat.watchdog.start()
    exchange = EveryOther(replica.trained, launcher.heartbeat.watchdog)
    yield exchange
    launcher.close()


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=8, help="of each kind (8)")
    parser.add_argument("--iterations", type=int, default=60, help="of a block (60)")
    flags = parser.parse_args(arguments)
    environment = {**os.environ, **child_environment(threads=1)}
    if environment != dict(os.environ):
        os.execve(
            sys.executable,
            [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]],
            environment,
        )
    torch.set_num_threads(1)
    blocks: dict[Block, list[list[float]]] = {block: [] for block in Block}
    with tempfile.TemporaryDirectory(prefix="poseidon-cost-") as name:
        folder = Path(name)
        (folder / "net.prototxt").write_text(NET, encoding="ascii")
        write_pictures(folder / "train_lmdb", 0, RECORDS)
        block_s(folder, Block.BEATING, flags.iterations)
        for _ in range(flags.blocks):
            for block in Block:
                blocks[block].append(block_s(folder, block, flags.iterations))
        size = sum(path.stat().st_size for path in folder.glob("snap_iter_*"))
    usual = blocks[Block.BEATING]
    bare_s = statistics.median(chain(*(block[::2] for block in usual)))
    # Each iteration that has the watchdog beside the bare one before it.
    pairs = chain(*(zip(block[::2], block[1::2], strict=False) for block in usual))
    beats_s = statistics.median(after - before for before, after in pairs)
    snapshot_s = statistics.median(map(_beyond_median, blocks[Block.ALL])) - statistics.median(
        map(_beyond_median, usual)
    )
    print(
        f"an iteration: {bare_s * 1e3:.2f} ms; a snapshot: {size / 2**20:.0f} MiB, weights and "
        "history"
    )
    print(f"heartbeats: {beats_s * 1e6:+.0f} us an iteration, {beats_s / bare_s:+.2%}")
    print(f"a snapshot: {snapshot_s * 1e3:+.0f} ms of processor time")
    for interval in (100, 1000, 10_000):
        share = (beats_s + snapshot_s / interval) / bare_s
        print(f"together, with a snapshot every {interval} iterations: {share:+.2%} of the time")
    return 0


def _beyond_median(iterations: list[float]) -> float:
    """Return the seconds that a block takes beyond as many median iterations."""
    return sum(iterations) - len(iterations) * statistics.median(iterations)


if __name__ == "__main__":
    raise SystemExit(main())
