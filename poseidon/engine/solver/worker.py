"""`python -m poseidon.engine.solver.worker`: the process of one worker of `poseidon train`.

The launcher starts it and writes the job document to the first line of its standard input. It then
receives commands there and sends events on standard output, both as JSON lines
(`poseidon.cluster.events` lists them). The log goes to standard error and to
`<output>/worker_<rank>.log`.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # imports leave little garbage, and looking for it takes a sixth of the start; `main` enables it
    gc.disable()

import argparse
import contextlib
import logging
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from poseidon import log
from poseidon.engine.averages import SmoothedLoss
from poseidon.engine.document import JobDocument, read_document
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.engine.observation import Observation, log_plan, open_trace
from poseidon.engine.snapshot_writer import SnapshotSettings, WrittenSnapshot
from poseidon.engine.solver.checkpoint import Checkpoint, Progress, Resumed
from poseidon.engine.solver.replica import Replica
from poseidon.engine.solver.summary import net_table
from poseidon.engine.solver.tester import Tester
from poseidon.engine.solver.trainer import LoopSettings, Trainer
from poseidon.engine.tools.preflight import weight_files
from poseidon.errors import PoseidonError, counted, out_of_files, out_of_memory
from poseidon.exchange.base import ExchangeSettings
from poseidon.exchange.build import build_exchange
from poseidon.exchange.building.membership import Built
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.observe.watchdog import WatchdogObserver
from poseidon.layers.base import LayerContext
from poseidon.layers.user_modules import import_modules, problem_in
from poseidon.metrics.glog_lines import GlogSink, number
from poseidon.metrics.netoutputs import NetOutputs
from poseidon.metrics.record import Sink, TestRecord, TrainRecord
from poseidon.proto.caffe_pb2 import TRAIN
from poseidon.proto.definition import read_solver
from poseidon.proto.shipped import unpack_solver
from poseidon.solvers.settings import solver_settings
from ps_server import PeerLost, ServerError, StalenessTimeout
from ps_server.numerics import prepare_process
from ps_server.trace import NO_TRACE

LOGGER = logging.getLogger("poseidon.engine.solver.worker")
PROGRESS_S = 0.25
TRAINED_S = 0.2
MOST_OUTPUTS = 100
"""The most outputs of a net that an event carries."""


class ProgressReporter:
    """Reports progress to the launcher, a few times a second; a run that makes no iteration
    reports its start at its end.
    """

    def __init__(
        self,
        launcher: LauncherConnection,
        max_iter: int,
        images_per_iteration: int,
        start: Progress,
    ) -> None:
        self._launcher = launcher
        self._max_iter = max_iter
        self._images = images_per_iteration
        self._next_s = 0.0
        self._iteration = start.iteration
        self._loss: float | None = None
        self._unreported: tuple[int, SmoothedLoss] | None = None
        if start.losses:
            self._unreported = (start.iteration, SmoothedLoss(len(start.losses), start.losses))

    def __call__(self, iteration: int, smoothed: SmoothedLoss) -> None:
        """Note an iteration; report it when the last report is long enough ago."""
        self._unreported = (iteration, smoothed)
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + PROGRESS_S
            self.report()

    def report(self) -> None:
        """Report the latest iteration, unless it is reported already."""
        if self._unreported is None:
            return
        (self._iteration, smoothed), self._unreported = self._unreported, None
        self._loss = smoothed.value
        self._send()

    def test(self, done: int, count: int) -> None:
        """Note a batch of a test; report it when the last report is long enough ago.

        Args:
            done: batches that this worker has scored.
            count: those that it will score.
        """
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + PROGRESS_S
            self.report()
            self._send(tested=done, to_test=count)

    def _send(self, **test: int) -> None:
        self._launcher.send(
            "progress",
            iteration=self._iteration,
            max_iter=self._max_iter,
            images=self._iteration * self._images,
            loss=self._loss,
            **test,
        )


class ScoreReporter:
    """Reports displayed iterations and the scores of each test to the launcher. See `Sink`."""

    def __init__(self, launcher: LauncherConnection) -> None:
        self._launcher = launcher
        self._next_s = 0.0

    def on_train(self, record: TrainRecord) -> None:
        """See `Sink`; reports at most every `TRAINED_S` seconds."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + TRAINED_S
        outputs = [[output.name, output.value] for output in record.outputs[:MOST_OUTPUTS]]
        self._launcher.send(
            "trained",
            iteration=record.iteration,
            loss=record.loss,
            rate=record.rate,
            outputs=outputs,
        )

    def on_test(self, record: TestRecord) -> None:
        """See `Sink`."""
        scores = [[output.name, number(output.value)] for output in record.outputs]
        self._launcher.send("tested", iteration=record.iteration, net=record.net, scores=scores)

    def close(self) -> None:
        """See `Sink`."""


class Worker:
    """One worker of `poseidon train`, from its document to the end of training."""

    def __init__(self, document: JobDocument, launcher: LauncherConnection) -> None:
        self._document = document
        self._launcher = launcher
        self._log = GlogSink(logging.getLogger("poseidon.solver"))

    def run(self) -> None:
        """Build the nets, train, and leave the job."""
        document = self._document
        import_modules(document.imports)
        packed = document.definitions
        solver = unpack_solver(packed) if packed else read_solver(document.solver)
        solver = solver.with_settings(document.settings).with_train_state(
            level=int(document.level) if document.level else None, stages=document.stages
        )
        settings = solver_settings(solver)
        context = LayerContext(
            phase=TRAIN,
            seed=document.seed,
            rank=document.rank,
            workers=document.workers,
            client=document.client,
            clients=document.clients,
            local_rank=document.local_rank,
            local_workers=document.local_workers,
            device=torch.device(document.device),
        )
        replica = Replica(solver, settings, context)
        try:
            self._train(replica)
        finally:
            replica.close()

    def _train(self, replica: Replica) -> None:
        document, rank = self._document, self._document.rank
        member = document.membership()
        checkpoint = Checkpoint(
            replica,
            settings=SnapshotSettings(
                keep=document.snapshot_keep,
                on_written=self._report_snapshot,
                on_wait=self._launcher.watchdog.progress,
                stop_at_nan=document.stop_at_nan,
            ),
        )
        resumed = self._starting_point(replica, checkpoint)
        start = Progress(iteration=0) if resumed is None else resumed.progress
        trace = open_trace(Path(document.output), rank) if document.trace else NO_TRACE
        self._launcher.send("ready")
        watchdog = self._launcher.watchdog
        watchdog.start()
        with watchdog.waiting():
            built = build_exchange(
                replica.trained,
                ExchangeSettings(
                    clip=replica.settings.clip,
                    gradient_scale=1.0 / replica.settings.iter_size,
                    start_clock=start.iteration,
                ),
                member,
                self._launcher.exchange_addresses,
                trace=trace,
                schemes=() if resumed is None else resumed.schemes,
            )
        if built.measured:
            checkpoint.schemes = tuple(choice.scheme for choice in built.plan.choices)
        layers = replica.train.layer_modules
        seen = Observation(
            built, layers, trace, self._launcher.send, observers=[WatchdogObserver(watchdog)]
        )
        exchange = seen.exchange
        for net in (replica.train, *(test for _, test in replica.tests)):
            net.register_forward_pre_hook(lambda *_: watchdog.progress())
        try:
            if resumed is not None:
                exchange.state.hold_back(resumed.held_back)
            exchange.open(
                None if resumed is None else resumed.histories(local_steps=built.local_steps)
            )
            gc.collect()
            # present objects stay to the end: the collector need not scan them in every pass
            gc.freeze()
            self._launcher.forward_requests(exchange, rank)
            if rank == 0:
                self._log_start(replica, built)
            with self._trainer(replica, exchange, checkpoint, start) as trainer:
                seen.watch()
                trainer.run()
        finally:
            watchdog.stop()
            seen.close()

    def _starting_point(self, replica: Replica, checkpoint: Checkpoint) -> Resumed | None:
        document = self._document
        if not document.snapshot:
            self._log_notes(replica.load(weight_files(replica.solver, document.weights)))
            return None
        resumed = checkpoint.restore(
            Path(document.snapshot), private_histories=document.membership().private_histories
        )
        self._log_notes(replica.load([resumed.model]))
        if self._document.rank == 0:
            LOGGER.info(
                "going on from %s at iteration %d", document.snapshot, resumed.progress.iteration
            )
        return resumed

    def _report_snapshot(self, written: WrittenSnapshot) -> None:
        self._launcher.send(
            "snapshot",
            state=str(written.state.absolute()),
            iteration=written.iteration,
            seconds=round(written.seconds, 3),
        )

    def _log_notes(self, notes: list[str]) -> None:
        if self._document.rank == 0:
            for note in notes:
                LOGGER.info("%s", note)

    def _log_start(self, replica: Replica, built: Built) -> None:
        document = self._document
        tables = [[replica.trained[index].name for index in table] for table in built.tables]
        for line in net_table(replica.train, tables, built.store):
            LOGGER.info("%s", line)
        alone = document.membership().alone
        if not alone:
            log_plan(built.plan, Path(document.output))
        LOGGER.info(
            "%s%s, %s, seed %d",
            counted(document.workers, "worker"),
            f" x batch {replica.batch_records}" if replica.batch_records else "",
            "no server"
            if alone
            else f"{document.exchange.kind.value}, {counted(document.shards, 'shard')}, "
            f"{document.exchange.consistency.value}, "
            f"staleness {document.exchange.staleness}"
            + (f", {built.local_steps} local steps a round" if built.local_steps else ""),
            document.seed,
        )

    @contextlib.contextmanager
    def _trainer(
        self, replica: Replica, exchange: Exchange, checkpoint: Checkpoint, start: Progress
    ) -> Iterator[Trainer]:
        document, settings = self._document, replica.settings
        images = replica.batch_records * document.workers * settings.iter_size
        progress = ProgressReporter(self._launcher, settings.max_iter, images, start)
        testers = [
            Tester(
                replica,
                index,
                exchange,
                stop_wanted=self._launcher.stopping.is_set,
                on_batch=progress.test,
            )
            for index in range(len(replica.tests))
        ]
        sinks: list[Sink] = [ScoreReporter(self._launcher)]
        if document.net_outputs and document.rank == 0:
            sinks.append(
                NetOutputs(
                    Path(document.net_outputs),
                    resumed_at=start.iteration if document.goes_on else 0,
                )
            )
        trainer = Trainer(
            replica,
            exchange,
            LoopSettings(
                prefix=replica.solver.snapshot_prefix(Path(document.output)),
                title=replica.train.definition.param.name or Path(document.solver).stem,
                on_progress=progress,
                exchange=document.exchange,
                stop_at_nan=document.stop_at_nan,
            ),
            checkpoint=checkpoint,
            testers=testers,
            log=self._log,
            sinks=sinks,
            start=start,
        )
        try:
            yield trainer
        finally:
            # also after a failure: the launcher reports the iterations that will be repeated
            progress.report()


def main(arguments: list[str] | None = None) -> int:
    """Run a worker. Return the exit code."""
    gc.enable()
    parser = argparse.ArgumentParser(
        prog="python -m poseidon.engine.solver.worker",
        description="One worker of a job; started by `poseidon train`, which writes its document "
        "to standard input.",
    )
    parser.add_argument("--job", help="marks the process as part of a job")
    parser.add_argument("--rank", help="marks the process for people")
    parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    logging.raiseExceptions = False  # a terminal that has gone must not end training
    launcher = LauncherConnection()
    try:
        document = read_document(sys.stdin.readline())
        prepare_process(document.threads)
        outputs = log.setup(
            stream=sys.stderr, file=Path(document.output) / f"worker_{document.rank}.log"
        )
    except (PoseidonError, OSError) as error:
        launcher.send("error", message=str(error), exit_code=getattr(error, "exit_code", 1))
        return 1
    with outputs:
        return run_worker(document, launcher)


def run_worker(document: JobDocument, launcher: LauncherConnection) -> int:
    """Run a worker and report its end. Return the exit code."""
    launcher.start()
    try:
        Worker(document, launcher).run()
    except (PoseidonError, ServerError) as error:
        LOGGER.critical("%s", error)
        lost = isinstance(error, PeerLost | StalenessTimeout)
        launcher.send(
            "error", message=str(error), exit_code=getattr(error, "exit_code", 1), peer_lost=lost
        )
        return 1
    except Exception as error:  # noqa: BLE001 - the outermost frame: the log has all of it, the launcher one sentence
        where = Path(document.output) / f"worker_{document.rank}.log"
        with (
            contextlib.suppress(OSError),
            where.open("a", encoding="utf-8", errors="backslashreplace") as log_file,
        ):
            traceback.print_exc(file=log_file)
        problem = out_of_memory(error) or out_of_files(error)
        own = problem_in(document.imports, error) or f"{type(error).__name__}: {error}"
        what = f"worker {document.rank}: {problem}" if problem else own
        launcher.send("error", message=f"{what} (details in {where})", exit_code=1)
        return 1
    finally:
        launcher.close()
    launcher.send("done")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
