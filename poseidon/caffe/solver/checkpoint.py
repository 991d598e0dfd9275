"""Snapshots of a running job, and resuming from one.

Law: a snapshot is the state after one iteration that all workers have finished. At staleness 0 a
resumed run ends with the same bits as one that never stopped: a snapshot has weights, histories,
every reader's position, random states and the losses in the average. All of these belong to virtual
workers, so the bits are the same on any number of processes with as many virtual workers.

Training waits while the contents of a snapshot are copied. `SnapshotWriter` writes the files in the
background. A snapshot is valid once its checksums are written (`poseidon.engine.snapshots.checksums`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe.proto.blob import from_array, to_array
from poseidon.caffe.proto.caffe_pb2 import (
    BlobProto,
    PoseidonState,
    PoseidonWorkerState,
    SolverParameter,
)
from poseidon.caffe.snapshot import hdf5
from poseidon.caffe.snapshot.caffemodel import write_model
from poseidon.caffe.snapshot.files import model_path, state_path
from poseidon.caffe.snapshot.solverstate import RunState, learned_net, read_state, write_state
from poseidon.caffe.solver.finite import REMEDY, not_finite
from poseidon.caffe.solver.frozen import FrozenHistories
from poseidon.caffe.solver.rate import current_step
from poseidon.caffe.solver.replica import Replica, Values
from poseidon.caffe.solver.worker_state import restore, state_of
from poseidon.engine.snapshots.checksums import check, seal
from poseidon.engine.snapshots.files import make_folder
from poseidon.engine.snapshots.rotation import remove_older
from poseidon.engine.snapshots.runs import Begun, Prefixes
from poseidon.engine.snapshots.writer import SnapshotSettings, SnapshotWriter, WrittenSnapshot
from poseidon.errors import JobError, SnapshotError, counted
from poseidon.exchange.base import History
from poseidon.exchange.broadcast import gather_bytes
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.kinds import Scheme
from poseidon.observe.metrics.glog_lines import GlogSink, snapshotting
from ps_server.numerics import Computation
from ps_server.rules import history_count

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverProgress:
    """The position of a training loop.

    Attributes:
        losses: losses in the average, oldest first, of each virtual worker of this process; empty:
            there are none.
    """

    iteration: int
    tests_done: int = 0
    losses: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The state of a snapshot that a job resumes from.

    Attributes:
        model: the file of the weights; None: a snapshot in memory.
        own_histories: for each virtual worker of this process, one per trained tensor; the same
            one where all share it.
        outer: the histories of the outer rule of local steps, one per trained tensor; empty: none.
        held_back: `ExchangeState.held_back` of all processes; where two have one name, of this
            process.
        schemes: of each trained tensor, if `--exchange=auto` or `hybrid` chose them and the job has
            as many virtual workers; else empty.
    """

    progress: SolverProgress
    model: Path | None = None
    own_histories: list[list[History]]
    outer: list[History]
    held_back: Mapping[str, NDArray[np.float32]]
    schemes: tuple[Scheme, ...] = ()

    def histories(self, *, local_steps: int) -> list[History]:
        """Return the histories that the exchange continues from."""
        if not local_steps:
            return self.own_histories[0]
        outer = self.outer or [()] * len(self.own_histories[0])
        return [
            [array for part in parts for array in part]
            for parts in zip(*self.own_histories, outer, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """The contents of a snapshot: copies, which training no longer changes."""

    state_path: Path
    begun: Begun
    run: RunState
    blobs: hdf5.NamedBlobs
    diffs: hdf5.NamedBlobs | None


class Checkpoint:
    """Saves and restores the state of one worker's process; rank 0 writes the files.

    Args:
        writer: writes them, one after another; None: a new one.
        job: the id of the job; empty: there is none.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        settings: SnapshotSettings | None = None,
        writer: SnapshotWriter | None = None,
        job: str = "",
    ) -> None:
        self._replica = replica
        self._solver = replica.solver.param
        self._arrays_per_blob = history_count(replica.settings.base_rule.kind)
        self._rank = replica.context.rank
        self._workers = replica.virtual_workers.count
        self._settings = settings or SnapshotSettings()
        self.frozen = FrozenHistories(replica.train.parameters_info, replica.settings)
        self._writer = writer or SnapshotWriter(self._settings.on_wait)
        self._prefixes = Prefixes(job)
        self._resumed: Path | None = None
        self.schemes: tuple[Scheme, ...] = ()
        """The scheme of each trained tensor, where a resumed run cannot find it out again."""

    def begin(self, prefix: Path) -> None:
        """Take the prefix before training: of a job that would have to end at its first snapshot.

        Raises:
            SnapshotError: another job that runs writes with this prefix.
        """
        if self._rank == 0:
            make_folder(prefix.parent)
            begun = self._take(prefix)
            if begun.beside is not None:
                LOGGER.info(
                    "%s is of an earlier run, which this run does not continue: it stays, "
                    "snapshots with the same numbers are replaced, and --snapshot=JOB takes this "
                    "run's",
                    begun.beside,
                )

    def _take(self, prefix: Path) -> Begun:
        in_hdf5 = self._solver.snapshot_format == SolverParameter.HDF5
        ending = state_path(prefix, 0, hdf5=in_hdf5).name.removeprefix(f"{prefix.name}_iter_0")
        return self._prefixes.take(prefix.absolute(), ending, self._resumed)

    def save(
        self,
        prefix: Path,
        progress: SolverProgress,
        exchange: Exchange,
        log: GlogSink,
        *,
        histories: Sequence[History] | None = None,
        before: Values | None = None,
        last: bool = False,
    ) -> None:
        """Start to write a snapshot. Every worker calls this after the same iteration.

        It is complete once `finish` has returned. A failure to write it is a warning, and the error
        of `finish` if no later snapshot was written. A snapshot with a number that is not finite is
        not written, and no older one is removed.

        Args:
            histories: after the last iteration, on rank 0; None: the exchange collects them.
            before: the blobs before the last iteration, whose changes are the diffs of the model;
                None: no diffs.
            last: the run writes no other, so the job fails if this one cannot be written, and its
                weights go to `SnapshotSettings.spare`.

        Raises:
            JobError: a number in it is not finite, and `SnapshotSettings.stop_at_nan`.
            SnapshotError: another job that runs writes with this prefix.
        """
        exchange.settle()
        own = PoseidonState(worker=self._worker_states(progress, exchange))
        payloads = gather_bytes(
            own.SerializeToString(), exchange.control.all_gather, keeps=self._rank == 0
        )
        if self._rank != 0:
            return
        states = [
            state for payload in payloads for state in PoseidonState.FromString(payload).worker
        ]
        if exchange.state.private:
            histories = self._averaged(states)
        elif histories is None:
            histories = list(exchange.state.histories().values())
        diffs = None if before is None else self._replica.changes_since(before)
        contents = self._contents(prefix, progress, states, histories, diffs)
        if not self._is_finite(contents):
            return
        log.write(*snapshotting(contents.run.model, str(contents.state_path)))
        write = self._write_last if last else self._write
        self._writer.submit(lambda: write(contents), last=last)

    def _is_finite(self, contents: _Contents) -> bool:
        infos = self._replica.train.parameters_info
        histories = [
            (f"the history of {i.name}", h)
            for i, h in zip(infos, contents.run.histories, strict=True)
        ]
        name = not_finite(
            [*((f"layer '{layer}'", blobs) for layer, _, blobs in contents.blobs), *histories]
        )
        if not name:
            return True
        text = f"after iteration {contents.run.iteration} {name} holds a number that is not finite: no snapshot is written"
        if self._settings.stop_at_nan:
            raise JobError(f"worker {self._rank}: {text}; {REMEDY}")
        LOGGER.warning("%s, and earlier ones stay", text)
        return False

    def finish(self) -> None:
        """Wait until the last snapshot is complete.

        Raises:
            SnapshotError: it could not be written; earlier snapshots are untouched.
        """
        self._writer.wait()

    def leave(self) -> None:
        """Leave the prefix to other jobs."""
        self._prefixes.release()

    def _worker_states(
        self, progress: SolverProgress, exchange: Exchange
    ) -> list[PoseidonWorkerState]:
        """Return the state of each virtual worker of this process.

        What codecs hold back is with its first one.
        """
        states = []
        for nets, losses in zip(self._replica.nets, progress.losses, strict=True):
            state = state_of(nets, losses)
            state.MergeFrom(PoseidonWorkerState(**asdict(self._computation())))
            states.append(state)
        first = states[0]
        for name, array in exchange.state.held_back().items():
            first.held_back.add(name=name, values=from_array(array))
        if exchange.state.private:
            n = self._arrays_per_blob
            for history in exchange.state.histories().values():
                for at, state in enumerate(states):
                    state.history.extend(map(from_array, history[n * at : n * (at + 1)]))
                first.outer_history.extend(map(from_array, history[n * len(states) :]))
        return states

    def _averaged(self, states: Sequence[PoseidonWorkerState]) -> list[History]:
        """Return the mean of the workers' histories, which Caffe can resume from."""
        columns = zip(
            *([to_array(blob) for blob in state.history] for state in states), strict=True
        )
        means = [np.asarray(np.mean(column, axis=0), dtype=np.float32) for column in columns]
        n = self._arrays_per_blob
        return [means[i : i + n] for i in range(0, len(means), n)]

    def _contents(
        self,
        prefix: Path,
        progress: SolverProgress,
        states: Sequence[PoseidonWorkerState],
        histories: Sequence[History],
        diffs: hdf5.NamedBlobs | None,
    ) -> _Contents:
        in_hdf5 = self._solver.snapshot_format == SolverParameter.HDF5
        extra = PoseidonState(
            workers=self._workers,
            worker=states,
            tests_done=progress.tests_done,
            random_seed=self._replica.context.seed,
            scheme=[scheme.value for scheme in self.schemes],
        )
        run = RunState(
            iteration=progress.iteration,
            model=str(model_path(prefix, progress.iteration, hdf5=in_hdf5)),
            histories=tuple(
                tuple(map(np.array, arrays)) for arrays in self._for_all_blobs(histories)
            ),
            current_step=current_step(self._solver, progress.iteration),
            poseidon=extra,
        )
        return _Contents(
            state_path=state_path(prefix, progress.iteration, hdf5=in_hdf5),
            begun=self._take(prefix),
            run=run,
            blobs=self._replica.train.layer_blobs(),
            diffs=diffs,
        )

    def _write(self, contents: _Contents) -> None:
        """Write a snapshot: the weights, the state that names them, their checksums; then remove
        an old one.
        """
        began_s = time.monotonic()
        model, state = Path(contents.run.model), contents.state_path
        make_folder(state.parent)
        self._write_model(model, contents)
        write_state(state, contents.run)
        seal(state, model, run=contents.begun.run)
        seconds = time.monotonic() - began_s
        self._settings.on_written(
            WrittenSnapshot(state=state, iteration=contents.run.iteration, seconds=seconds)
        )
        remove_older(state, self._settings.keep)

    def _write_last(self, contents: _Contents) -> None:
        """Write the last snapshot; if that fails, its weights where there may be room."""
        try:
            self._write(contents)
        except SnapshotError as error:
            spare = self._settings.spare
            if spare is None or spare.resolve() == contents.state_path.parent.resolve():
                raise
            model = spare / Path(contents.run.model).name
            try:
                self._write_model(model, contents)
            except SnapshotError:
                raise error from None
            raise SnapshotError(
                f"{error}; the weights of iteration {contents.run.iteration} are in {model}, without "
                f"the solver's state: --weights={model} trains on from them"
            ) from error

    def _write_model(self, model: Path, contents: _Contents) -> None:
        train = self._replica.train
        if self._solver.snapshot_format == SolverParameter.HDF5:
            hdf5.write_model(model, contents.blobs, owned=train.owned_blobs(), diffs=contents.diffs)
        else:
            write_model(model, train.definition.param, contents.blobs, diffs=contents.diffs)

    def _for_all_blobs(self, histories: Sequence[History]) -> list[History]:
        """Add the histories of frozen blobs, which Caffe keeps too."""
        known = dict(zip((info.name for info in self._replica.exchanged), histories, strict=True))
        known |= self.frozen.arrays()
        return [
            known.get(info.name, [np.zeros(info.shape, np.float32)] * self._arrays_per_blob)
            for info in self._replica.train.parameters_info
        ]

    def restore(self, path: Path, *, private_histories: bool) -> Resumed:
        """Restore the positions of the readers and the random states.

        Args:
            path: the `.solverstate`.
            private_histories: `ExchangeState.private` of the exchange to come.

        Raises:
            SnapshotError: the file, or the weights it names, is missing, broken, or does not fit.
        """
        check(path)
        self._resumed = path
        infos = self._replica.train.parameters_info
        state = read_state(path, [(info.name, info.shape) for info in infos], self._arrays_per_blob)
        exchanged = {info.name for info in self._replica.exchanged}
        histories: list[History] = [
            history
            for info, history in zip(infos, state.histories, strict=True)
            if info.name in exchanged
        ]
        self.frozen.restore(
            {info.name: found for info, found in zip(infos, state.histories, strict=True)}
        )
        own = self._own_states(path, state)
        if own:
            batches = state.iteration * self._solver.iter_size
            for nets, saved in zip(self._replica.nets, own, strict=True):
                restore(nets, saved, batches=batches)
        own_histories = [histories] * len(self._replica.nets)
        if private_histories and own and own[0].history:
            own_histories = [self._own_history(path, saved) for saved in own]
        progress = SolverProgress(
            iteration=state.iteration,
            tests_done=state.poseidon.tests_done,
            losses=tuple(tuple(one.smoothed_loss) for one in own),
        )
        return Resumed(
            progress=progress,
            model=learned_net(state, path),
            own_histories=own_histories,
            outer=self._outer_histories(path, state.poseidon.worker),
            held_back=self._held_back(path, [*state.poseidon.worker, *own] if own else ()),
            schemes=_schemes(path, state.poseidon.scheme, len(exchanged)) if own else (),
        )

    @staticmethod
    def _held_back(
        path: Path, workers: Sequence[PoseidonWorkerState]
    ) -> dict[str, NDArray[np.float32]]:
        found: dict[str, NDArray[np.float32]] = {}
        for worker in workers:
            try:
                found |= {part.name: to_array(part.values) for part in worker.held_back}
            except ValueError as error:
                raise SnapshotError(
                    f"{path}: what worker {worker.rank} has held back is damaged: {error}"
                ) from error
        return found

    def _own_states(self, path: Path, state: RunState) -> list[PoseidonWorkerState]:
        """Return the state of each virtual worker of this process; none if the snapshot has no
        state for as many virtual workers.
        """
        if state.poseidon.workers == self._workers:
            if len(state.poseidon.worker) != self._workers:
                raise SnapshotError(
                    f"{path} is damaged: it has the places of {len(state.poseidon.worker)} of "
                    f"{self._workers} virtual workers"
                )
            own = [state.poseidon.worker[nets.number] for nets in self._replica.nets]
            self._compare_computation(path, own)
            return own
        # Written by Caffe, or by a different number of workers: resume after as many records as
        # were read then.
        if self._rank == 0:
            written = counted(state.poseidon.workers, "virtual worker")
            LOGGER.warning(
                "%s was written by %s and this job has %d: each continues at iteration %d of its "
                "own part of the data, so the records differ from an uninterrupted run",
                path,
                written if state.poseidon.workers else "Caffe",
                self._workers,
                state.iteration,
            )
        for nets in self._replica.nets:
            for _, reader in nets.train.readers():
                reader.skip_to(state.iteration * self._solver.iter_size)
        return []

    def _computation(self) -> Computation:
        return Computation.here(self._replica.context.device)

    def _compare_computation(self, path: Path, own: Sequence[PoseidonWorkerState]) -> None:
        """Warn if this run cannot have the bits of one that was never interrupted."""
        now = self._computation()
        for nets, state in zip(self._replica.nets, own, strict=True):
            then = Computation(
                threads=state.threads, processor=state.processor, torch_version=state.torch_version
            )
            if state.threads and then != now:
                LOGGER.warning(
                    "%s computed with %s when %s was written, and now with %s: the run continues "
                    "correctly, but not with the bits of an uninterrupted one",
                    nets.name,
                    then,
                    path.name,
                    now,
                )

    def _own_history(self, path: Path, own: PoseidonWorkerState) -> list[History]:
        n = self._arrays_per_blob
        arrays = self._arrays(path, own.history, own.rank)
        if len(arrays) != n * len(self._replica.exchanged):
            raise SnapshotError(f"{path} has {len(arrays)} history blobs for worker {own.rank}")
        return [arrays[i : i + n] for i in range(0, len(arrays), n)]

    def _outer_histories(self, path: Path, workers: Sequence[PoseidonWorkerState]) -> list[History]:
        """Return the outer history of each tensor, which all workers share: worker 0 has written
        it.
        """
        if not workers or not workers[0].outer_history:
            return []
        arrays = self._arrays(path, workers[0].outer_history, rank=0)
        n, rest = divmod(len(arrays), len(self._replica.exchanged))
        if rest:
            raise SnapshotError(
                f"{path} has {len(arrays)} outer history blobs; this net has "
                f"{len(self._replica.exchanged)} that are trained"
            )
        return [arrays[i : i + n] for i in range(0, len(arrays), n)]

    @staticmethod
    def _arrays(path: Path, blobs: Iterable[BlobProto], rank: int) -> list[NDArray[np.float32]]:
        try:
            return [to_array(blob) for blob in blobs]
        except ValueError as error:
            raise SnapshotError(
                f"{path}: the history of worker {rank} is damaged: {error}"
            ) from error


def _schemes(path: Path, values: Sequence[str], tensors: int) -> tuple[Scheme, ...]:
    """Return the schemes that a snapshot has; none, or one for each trained tensor."""
    try:
        found = tuple(Scheme(value) for value in values)
    except ValueError as error:
        raise SnapshotError(f"{path} is damaged: {error}") from error
    if len(found) not in (0, tensors):
        raise SnapshotError(
            f"{path} is damaged: it has the schemes of {len(found)} of {tensors} tensors"
        )
    return found
