"""The states of a solver's loop (`trainer.py`) on disk: `.solverstate` and `.caffemodel`.

Law: a snapshot is the state after one iteration that all workers have finished. At staleness 0 a
resumed run ends with the same bits as one that never stopped: a snapshot has weights, histories,
every reader's position, random states and the losses in the average. All of these belong to virtual
workers, so the bits are the same on any number of processes with as many virtual workers.

Training waits while the contents of a snapshot are copied. `SnapshotWriter` writes the files in the
background. A snapshot is valid once its checksums are written (`poseidon.engine.snapshot_files`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe.net.params import ParamInfo
from poseidon.caffe.proto.blob import from_array, to_array
from poseidon.caffe.proto.caffe_pb2 import (
    BlobProto,
    PoseidonState,
    PoseidonWorkerState,
    SolverParameter,
)
from poseidon.caffe.snapshot import hdf5
from poseidon.caffe.snapshot.caffemodel import model_path, state_path, write_model
from poseidon.caffe.snapshot.solverstate import RunState, learned_net, read_state, write_state
from poseidon.caffe.solver.loss_scale import REMEDY, not_finite
from poseidon.caffe.solver.replica import Replica, Values
from poseidon.caffe.solver.settings import current_step
from poseidon.engine.exchange_leaves import Named
from poseidon.engine.snapshot_files import (
    Run,
    SnapshotSettings,
    SnapshotWriter,
    WrittenSnapshot,
    check,
    make_folder,
    seal,
)
from poseidon.engine.snapshot_runs import Prefixes, remove_older
from poseidon.errors import JobError, SnapshotError
from poseidon.exchange.options import Scheme
from poseidon.observe.metrics.glog_lines import GlogSink, snapshotting
from ps_server.rules import history_count

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """The contents of a snapshot: copies, which training no longer changes."""

    state_path: Path
    snapshot_run: Run
    run: RunState
    blobs: hdf5.NamedBlobs
    diffs: hdf5.NamedBlobs | None


class Checkpoint:
    """Writes states, on rank 0, and reads them, on all workers.

    Args:
        writer: writes them, one after another; None: a new one.
        job: the id of the job; empty: there is none.

    Attributes:
        before: the blobs before the last iteration, whose changes are the diffs of the model; None:
            no diffs.
    """

    def __init__(
        self,
        replica: Replica,
        prefix: Path,
        *,
        settings: SnapshotSettings | None = None,
        writer: SnapshotWriter | None = None,
        job: str = "",
    ) -> None:
        self._replica = replica
        self._solver = replica.solver.param
        self._arrays_per_blob = history_count(replica.settings.base_rule.kind)
        self._prefix = prefix
        self._in_hdf5 = self._solver.snapshot_format == SolverParameter.HDF5
        self.settings = settings or SnapshotSettings()
        self._writer = writer or SnapshotWriter()
        self._prefixes = Prefixes(job)
        self._resumed: Path | None = None
        self.before: Values | None = None

    def begin(self) -> None:
        """Take the prefix before training: of a job that would have to end at its first snapshot.

        Raises:
            SnapshotError: another job that runs writes with this prefix, or the format cannot hold
                the names of the layers.
        """
        if self._replica.rank == 0:
            if self._in_hdf5:
                modules = self._replica.train.layer_modules
                hdf5.check_layers((name, len(layer.blob_specs)) for name, layer in modules)
            make_folder(self._prefix.parent)
            say = (
                "%s is of an earlier run, which this run does not continue: it stays, snapshots "
                "with the same numbers are replaced, and --snapshot=JOB takes this run's"
            )
            self._take(partial(LOGGER.info, say))

    def _take(self, on_earlier: Callable[[Path], object] = lambda _: None) -> Run:
        name = state_path(self._prefix, 0, hdf5=self._in_hdf5).name
        ending = name.removeprefix(f"{self._prefix.name}_iter_0")
        return self._prefixes.take(self._prefix.absolute(), ending, self._resumed, on_earlier)

    def save(self, state: Mapping[str, Any], log: GlogSink, *, last: bool = False) -> None:
        """Write a state; on rank 0, after an iteration that all workers have finished.

        The files may be incomplete when this returns. A failure to write them is a warning, and the error
        of `finish` if no later snapshot was written. A snapshot with a number that is not finite is
        not written, and no older one is removed.

        Args:
            state: of all workers. Training no longer changes it, its histories apart.
            last: the run writes no other, so the job fails if this one cannot be written, and its
                weights go to `SnapshotSettings.spare`.

        Raises:
            JobError: a number in it is not finite, and `SnapshotSettings.stop_at_nan`.
            SnapshotError: another job that runs writes with this prefix.
        """
        diffs = None if self.before is None else self._replica.changes_since(self.before)
        contents = self._contents(state, diffs)
        if not self._is_finite(contents):
            return
        log.write(*snapshotting(contents.run.model, str(contents.state_path)))
        write = self._write_last if last else self._write
        self._writer.submit(lambda: write(contents), last=last)

    def _is_finite(self, contents: _Contents) -> bool:
        infos = self._replica.train.parameters_info
        histories = zip(infos, contents.run.histories, strict=True)
        named = [(f"layer '{layer}'", blobs) for layer, _, blobs in contents.blobs]
        named += [(f"the history of {info.name}", list(of)) for info, of in histories]
        name = not_finite(named)
        if not name:
            return True
        text = f"after iteration {contents.run.iteration} {name} holds a number that is not finite: no snapshot is written"
        if self.settings.stop_at_nan:
            raise JobError(f"worker {self._replica.rank}: {text}; {REMEDY}")
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

    def _contents(self, state: Mapping[str, Any], diffs: hdf5.NamedBlobs | None) -> _Contents:
        iteration = state["iteration"]
        of_each = [one["history"] for one in state["own"]] if "history" not in state else []
        histories = _mean_of(of_each) if of_each else state["history"]
        known = {**histories, **state["frozen"]}
        extra = PoseidonState(
            workers=self._replica.virtual_workers.count,
            worker=[self._worker_state(one, private=bool(of_each)) for one in state["own"]],
            tests_done=state["tests_done"],
            random_seed=self._replica.context.seed,
            scheme=state["schemes"],
        )
        if "loss_scale" in state:
            extra.loss_scale, extra.loss_scale_since = state["loss_scale"]
        if of_each:
            extra.worker[0].outer_history.extend(self._blobs(state["outer"]))
        run = RunState(
            iteration=iteration,
            model=str(model_path(self._prefix, iteration, hdf5=self._in_hdf5)),
            histories=tuple(
                tuple(h.clone().numpy() for h in known.get(info.name) or self._zeros(info))
                for info in self._replica.train.parameters_info
            ),
            current_step=current_step(self._solver, iteration),
            poseidon=extra,
        )
        return _Contents(
            state_path=state_path(self._prefix, iteration, hdf5=self._in_hdf5),
            snapshot_run=self._take(),
            run=run,
            blobs=state["values"],
            diffs=diffs,
        )

    def _zeros(self, info: ParamInfo, arrays: int | None = None) -> list[Tensor]:
        count = self._arrays_per_blob if arrays is None else arrays
        return [torch.zeros(info.shape)] * count

    def _blobs(self, histories: Named) -> Iterator[BlobProto]:
        """Yield the histories of all tensors; Caffe's rule keeps those of statistics at zero."""
        count = max(map(len, histories.values()), default=0)
        for info in self._replica.exchanged:
            for tensor in histories.get(info.name) or self._zeros(info, count):
                yield from_array(tensor.numpy())

    def _worker_state(self, own: Mapping[str, Any], *, private: bool) -> PoseidonWorkerState:
        """Return the state of a virtual worker as a message."""
        state = PoseidonWorkerState.FromString(own["worker"])
        for name, tensor in own["held_back"].items():
            state.held_back.add(name=name, values=from_array(tensor.numpy()))
        if private:
            state.history.extend(self._blobs(own["history"]))
        return state

    def _write(self, contents: _Contents) -> None:
        """Write a snapshot: the weights, the state that names them, their checksums; then remove
        an old one.
        """
        began_s = time.monotonic()
        model, state = Path(contents.run.model), contents.state_path
        make_folder(state.parent)
        self._write_model(model, contents)
        write_state(state, contents.run)
        seal(state, model, run=contents.snapshot_run)
        seconds = time.monotonic() - began_s
        self.settings.on_written(
            WrittenSnapshot(state=state, iteration=contents.run.iteration, seconds=seconds)
        )
        remove_older(state, self.settings.keep)

    def _write_last(self, contents: _Contents) -> None:
        """Write the last snapshot; if that fails, its weights where there may be room."""
        try:
            self._write(contents)
        except SnapshotError as error:
            spare = self.settings.spare
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
        if self._in_hdf5:
            hdf5.write_model(model, contents.blobs, owned=train.owned_blobs(), diffs=contents.diffs)
        else:
            write_model(model, train.definition.param, contents.blobs, diffs=contents.diffs)

    def restore(self, path: Path) -> dict[str, Any]:
        """Return the state in a file, and with the name "model" the file of its weights.

        One that has no state for as many virtual workers has none of any.

        Raises:
            SnapshotError: the file, or the weights it names, is missing, broken, or does not fit.
        """
        check(path)
        self._resumed = path
        infos = self._replica.train.parameters_info
        state = read_state(path, [(info.name, info.shape) for info in infos], self._arrays_per_blob)
        saved = state.poseidon
        if len(saved.worker) != saved.workers:
            raise SnapshotError(
                f"{path} is damaged: it has the places of {len(saved.worker)} of "
                f"{saved.workers} virtual workers"
            )
        exchanged = self._replica.exchanged
        histories = {
            info.name: [torch.tensor(array) for array in found]
            for info, found in zip(infos, state.histories, strict=True)
        }
        found: dict[str, Any] = {
            "workers": saved.workers,
            "iteration": state.iteration,
            "tests_done": saved.tests_done,
            "model": learned_net(state, path),
            "history": {info.name: histories[info.name] for info in exchanged},
            "frozen": histories,
        }
        if saved.HasField("loss_scale"):
            found["loss_scale"] = [saved.loss_scale, saved.loss_scale_since]
        if saved.worker and saved.worker[0].outer_history:
            outer = saved.worker[0].outer_history
            found["outer"] = self._histories(path, outer, 0, len(outer) // len(exchanged))
        if saved.workers == self._replica.virtual_workers.count:
            found["schemes"] = _schemes(path, saved.scheme, len(exchanged))
        return {**found, "own": [self._own(path, worker) for worker in saved.worker]}

    def _own(self, path: Path, saved: PoseidonWorkerState) -> dict[str, Any]:
        """Return the state of a virtual worker as a value of the tree."""
        parts = [part.values for part in saved.held_back]
        values = _tensors(path, parts, f"what virtual worker {saved.rank} has held back")
        held_back = dict(zip((part.name for part in saved.held_back), values, strict=True))
        history = None
        if saved.history:
            history = self._histories(path, saved.history, saved.rank, self._arrays_per_blob)
        for part in ("history", "outer_history", "held_back"):
            saved.ClearField(part)
        return {"worker": saved.SerializeToString(), "held_back": held_back, "history": history}

    def _histories(self, path: Path, blobs: Sequence[BlobProto], rank: int, count: int) -> Named:
        """Return so many arrays of each trained tensor."""
        arrays = _tensors(path, blobs, f"the history of virtual worker {rank}")
        exchanged = self._replica.exchanged
        if len(arrays) != count * len(exchanged):
            raise SnapshotError(
                f"{path} has {len(arrays)} history blobs for virtual worker {rank}; this net "
                f"has {len(exchanged)} tensors that are trained"
            )
        return {
            info.name: arrays[count * at : count * (at + 1)] for at, info in enumerate(exchanged)
        }


def _tensors(path: Path, blobs: Sequence[BlobProto], what: str) -> list[Tensor]:
    try:
        return [torch.tensor(to_array(blob)) for blob in blobs]
    except ValueError as error:
        raise SnapshotError(f"{path}: {what} is damaged: {error}") from error


def _mean_of(of_workers: Sequence[Named]) -> Named:
    """Return the mean of the workers' histories, which Caffe can resume from."""
    return {
        name: [
            torch.from_numpy(np.asarray(np.mean([t.numpy() for t in column], axis=0), np.float32))
            for column in zip(*(own[name] for own in of_workers), strict=True)
        ]
        for name in of_workers[0]
    }


def _schemes(path: Path, values: Sequence[str], tensors: int) -> list[str]:
    """Return the schemes that a snapshot has; none, or one for each trained tensor."""
    try:
        found = [Scheme(value).value for value in values]
    except ValueError as error:
        raise SnapshotError(f"{path} is damaged: {error}") from error
    if len(found) not in (0, tensors):
        raise SnapshotError(
            f"{path} is damaged: it has the schemes of {len(found)} of {tensors} tensors"
        )
    return found
