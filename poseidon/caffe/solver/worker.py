"""One worker of `poseidon train` (`poseidon.engine.process` is its process)."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from poseidon.caffe.layers.registry import import_modules, location_in
from poseidon.caffe.net.compile import layer_context
from poseidon.caffe.proto.caffe_pb2 import TRAIN
from poseidon.caffe.proto.definition import SolverDefinition, read_solver
from poseidon.caffe.proto.projects import unpack_solver
from poseidon.caffe.solver.checkpoint import Checkpoint
from poseidon.caffe.solver.display import Display, ScoreReporter, net_table
from poseidon.caffe.solver.replica import Replica
from poseidon.caffe.solver.settings import solver_settings
from poseidon.caffe.solver.tester import Tester
from poseidon.caffe.solver.trainer import LoopSettings, Trainer
from poseidon.caffe.tools.preflight import weight_files
from poseidon.engine.document import JobDocument
from poseidon.engine.kept_state import KeptState
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.engine.memory import Snapshot, SolverMemory
from poseidon.engine.observation import Observation
from poseidon.engine.own_time import OwnTime
from poseidon.engine.snapshot_files import SnapshotSettings, SnapshotWriter
from poseidon.engine.this_process import unwatched
from poseidon.engine.work import NOTHING, ProgressReporter, TrainingWork
from poseidon.errors import JobError, counted
from poseidon.exchange.base import ExchangeSettings
from poseidon.exchange.build import build_exchange
from poseidon.exchange.device import choose_fastest
from poseidon.exchange.exchange import Built
from poseidon.exchange.options import Scheme
from poseidon.observe.metrics.glog_lines import GlogSink
from poseidon.observe.metrics.netoutputs import NetOutputs
from poseidon.observe.metrics.record import Sink
from ps_server import ServerError

LOGGER = logging.getLogger("poseidon.caffe.solver.worker")


class SolverWork(TrainingWork[JobDocument]):
    """One worker of `poseidon train`, from its document to the end of training."""

    document_class = JobDocument

    notes = MappingProxyType(
        {
            "stop": "asked to stop: the job ends after a few iterations, a test after its batch; a "
            "second request ends it at once",
            "snapshot": "asked for a snapshot: writing it after the iteration or test under way",
        }
    )

    def __init__(self, document: JobDocument, launcher: LauncherConnection) -> None:
        super().__init__(document, launcher)
        self._writer = SnapshotWriter(launcher.heartbeat.watchdog.progress)
        self._memory: SolverMemory | None = None
        self._schemes: tuple[Scheme, ...] = ()
        """Of each trained tensor, where a start cannot find it out again."""
        self._began_s: float | None = None

    def location(self, error: BaseException) -> str:
        """See `Work`: a line of the modules that register layers."""
        return location_in(self.document.imports, error)

    def run(self) -> Mapping[str, object]:
        """Build the nets, train, and leave the job.

        A worker that pauses keeps its nets and its memory snapshot for the next start.
        """
        with unwatched(self.launcher.heartbeat.watchdog):
            import_modules(self.document.imports)
            with contextlib.closing(self.replica()) as replica:
                while not self.has_ended(partial(self._train, replica)):
                    gc.unfreeze()
                    replica.go_on(self.document.member)
        return NOTHING

    def definition(self) -> SolverDefinition:
        """Read the job's definition."""
        packed = self.document.definitions
        return unpack_solver(packed) if packed else read_solver(self.document.solver)

    def replica(self) -> Replica:
        """Compile the nets."""
        document = self.document
        solver = (
            self.definition()
            .with_settings(document.settings)
            .with_train_state(
                level=int(document.level) if document.level else None, stages=document.stages
            )
        )
        context = layer_context(document, phase=TRAIN, seed=document.seed)
        replica = Replica(solver, solver_settings(solver), context, document.member)
        choose_fastest(document, shapes_change=bool(replica.train.changing_slots))
        return replica

    @property
    def newest_kept(self) -> Snapshot[KeptState] | None:
        """See `TrainingWork`: others need the whole state."""
        newest = None if self._memory is None else self._memory.newest
        return newest if newest is not None and newest.content.is_whole else None

    def _train(self, replica: Replica) -> None:
        document = self.document
        checkpoint = Checkpoint(
            replica,
            replica.solver.snapshot_prefix(Path(document.output)),
            settings=SnapshotSettings(
                keep=document.snapshot_keep,
                on_written=self.report_snapshot,
                stop_at_nan=document.stop_at_nan,
                spare=Path(document.output),
            ),
            writer=self._writer,
            job=document.job,
        )
        from_memory = document.rewind >= 0
        state = self._kept_state() if from_memory else self._read_state(replica, checkpoint)
        if replica.settings.snapshot or replica.settings.param.snapshot_after_train:
            checkpoint.begin()
        start = document.rewind if from_memory else 0 if state is None else state["iteration"]
        trace = self.open_trace()
        self.launcher.send("ready")
        watchdog = self.launcher.heartbeat.watchdog
        watchdog.start()
        with watchdog.waiting():
            built = build_exchange(
                replica.trained,
                ExchangeSettings(
                    clip=replica.settings.clip,
                    gradient_scale=1.0 / replica.settings.iter_size,
                    start_clock=start,
                ),
                self.membership(),
                self.launcher.exchange_addresses,
                trace=trace,
                schemes=self._known_schemes(replica, state),
            )
        if built.recorded:
            self._schemes = tuple(choice.scheme for choice in built.plan.choices)
        self.launcher.heartbeat.facts["most_lead"] = document.member.options.most_lead
        layers = [layer for nets in replica.nets for layer in nets.train.layer_modules]
        seen = Observation(built, layers, trace, self.launcher.send, observers=[watchdog])
        hooks = [
            net.register_forward_pre_hook(lambda *_: watchdog.progress())
            for nets in replica.nets
            for net in nets.all()
        ]
        try:
            with self._trainer(replica, built, checkpoint, start) as trainer:
                trainer.open(state, None if from_memory else Path(document.snapshot))
                del state  # it may be as large as the nets
                gc.collect()
                gc.freeze()  # the collector skips what is here, and stays for long
                self.launcher.forward_requests(built.exchange, document.rank)
                if document.rank == 0:
                    self._log_start(replica, built)
                seen.watch()
                trainer.run()
        except ServerError as error:
            if document.copies:  # so that closing waits for nobody
                self.launcher.interruption.interrupt(error)
            raise
        finally:
            watchdog.stop()
            for hook in hooks:  # the nets stay for the next start
                hook.remove()
            try:
                seen.close()
            finally:
                trace.close()

    def _balancing_time(self, replica: Replica) -> OwnTime | None:
        """Return what reports the times of iterations; None: nobody moves virtual workers."""
        if not self.document.balances:
            return None
        if reason := replica.keeps_state:
            self._log_notes([f"--balance=auto: virtual workers stay on their workers: {reason}"])
            return None
        return self.own_time()

    def _known_schemes(
        self, replica: Replica, state: Mapping[str, Any] | None
    ) -> tuple[Scheme, ...]:
        """Return the schemes that an earlier start or run has chosen; empty: none."""
        if schemes := self.document.schemes([trained.name for trained in replica.trained]):
            return schemes
        if self.document.rewind >= 0:
            return self._schemes
        return tuple(map(Scheme, {} if state is None else state.get("schemes", ())))

    def _read_state(self, replica: Replica, checkpoint: Checkpoint) -> dict[str, Any] | None:
        """Load the weights from which the job continues, or which it begins with; return the rest
        of the state.
        """
        document = self.document
        if not document.snapshot:
            self._log_notes(replica.load(weight_files(replica.solver, document.weights)))
            return None
        state = checkpoint.restore(Path(document.snapshot))
        self._log_notes(replica.load([state["model"]], own=True))
        replica.load_tests(weight_files(replica.solver, document.weights))  # of a restart
        if document.rank == 0:
            name, iteration = document.named(document.snapshot), state["iteration"]
            LOGGER.info("continuing from %s at iteration %d", name, iteration)
        return state

    def _kept_state(self) -> dict[str, Any]:
        """Return what this worker has of the memory snapshot from which the job continues.

        Raises:
            JobError: this is rank 0, and it does not have the snapshot.
        """
        document, newest = self.document, None if self._memory is None else self._memory.newest
        kept = KeptState(count=document.member.by_worker.count, shared={}, sent={})
        if newest is not None and newest.iteration == document.rewind:
            kept = newest.content
        if document.rank:
            return kept.part(document.rank)
        if not kept.is_whole:
            raise JobError(f"worker 0 has no memory snapshot of iteration {document.rewind}")
        LOGGER.info("continuing from memory at iteration %d", document.rewind)
        return kept.whole()

    def _log_notes(self, notes: list[str]) -> None:
        if self.document.rank == 0:
            for note in notes:
                LOGGER.info("%s", self.document.named(note))

    def _log_start(self, replica: Replica, built: Built) -> None:
        document = self.document
        tables = [[replica.trained[index].name for index in table] for table in built.tables]
        for line in net_table(replica.train, tables, built.store):
            LOGGER.info("%s", line)
        self.report_plan(built)
        virtual = document.member.by_worker
        LOGGER.info(
            "%s%s%s, %s, seed %d",
            counted(document.workers, "worker"),
            "" if virtual.is_one_each else f", {counted(virtual.count, 'virtual worker')}",
            f" x batch {replica.batch_records}" if replica.batch_records else "",
            "no server"
            if document.member.alone
            else f"{document.member.options.kind.value}, {counted(document.member.shards, 'shard')}, "
            f"{document.member.options.consistency.value}, staleness {document.member.options.staleness}"
            + (f", {built.plan.local_steps} local steps a round" if built.plan.local_steps else ""),
            document.seed,
        )

    @contextlib.contextmanager
    def _trainer(
        self,
        replica: Replica,
        built: Built,
        checkpoint: Checkpoint,
        start: int,
    ) -> Iterator[Trainer]:
        document, settings = self.document, replica.settings
        images = replica.batch_records * document.member.by_worker.count * settings.iter_size
        progress = ProgressReporter(
            self.launcher,
            lambda iteration: {
                "max_iter": settings.max_iter,
                "images": iteration * images,
                "virtual_workers": len(replica.nets),
                "loss": trainer.loss,
            },
            start,
        )
        testers = [
            Tester(
                replica,
                index,
                built.exchange,
                stop_wanted=self.launcher.requests.stopping.is_set,
                on_batch=lambda done, count: progress(
                    trainer.iteration, tested=done, to_test=count
                ),
            )
            for index in range(len(replica.tests))
        ]
        sinks: list[Sink] = [ScoreReporter(self.launcher.send)]
        if document.net_outputs and document.rank == 0:
            sinks.append(
                NetOutputs(
                    Path(document.net_outputs),
                    resumed_at=start if document.goes_on else 0,
                )
            )
        # seconds in the log go on after a pause
        self._began_s = self._began_s or time.monotonic()
        if document.copies:
            self._memory = SolverMemory(
                holds=document.holds_snapshots,
                start=start,
                every=document.memory_snapshot_every,
                steps=max(1, built.plan.local_steps),
                rewinds=document.rewind >= 0,
                newest=None if self._memory is None else self._memory.newest,
            )
        trainer = Trainer(
            replica,
            built.exchange,
            LoopSettings(
                title=replica.train.definition.param.name or Path(document.solver).stem,
                on_progress=progress,
                local_steps=built.plan.local_steps,
                schemes=self._schemes,
                own_time=self._balancing_time(replica),
                memory=self._memory,
            ),
            checkpoint=checkpoint,
            testers=testers,
            display=Display(
                replica,
                built.exchange.control,
                GlogSink(logging.getLogger("poseidon.solver")),
                sinks,
                began_s=self._began_s,
            ),
        )
        try:
            yield trainer
        finally:
            trainer.close()
            # also after a failure: the launcher reports the iterations that will be repeated
            progress.report()
