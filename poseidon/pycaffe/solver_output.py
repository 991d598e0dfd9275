"""What a solver of pycaffe writes: the log of its iterations and tests, and its snapshots."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from poseidon.base.paths import PLACEHOLDERS
from poseidon.caffe.proto.caffe_pb2 import SolverParameter
from poseidon.caffe.proto.definition import SolverDefinition
from poseidon.caffe.snapshot.caffemodel import model_path, state_path
from poseidon.caffe.snapshot.solverstate import RunState, write_state
from poseidon.caffe.solver.averages import SmoothedLoss, accumulate, named_values
from poseidon.caffe.solver.detection import Classes, DetectionTally
from poseidon.caffe.solver.settings import SolverSettings, current_step
from poseidon.engine.snapshot_files import make_folder, seal
from poseidon.engine.snapshot_runs import Prefixes
from poseidon.engine.this_process import current_context
from poseidon.observe.metrics.glog_lines import GlogSink, snapshotting
from poseidon.observe.metrics.record import TestRecord, TrainRecord
from poseidon.pycaffe.net import Net
from poseidon.pycaffe.update import Array

LOG = GlogSink(logging.getLogger("poseidon.solver"))


class SolverLog:
    """What a solver logs of its iterations: the mean of the last losses, and the time."""

    def __init__(self, settings: SolverSettings) -> None:
        self._settings = settings
        self._began_s = time.monotonic()
        self.restart()

    def restart(self) -> None:
        """Forget the losses."""
        self._smoothed = SmoothedLoss(self._settings.param.average_loss)

    def add(self, loss: float) -> None:
        """Add the loss of an iteration."""
        self._smoothed.add(torch.tensor(loss))

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def record(self, nets: Sequence[Net], iteration: int, rate: float) -> TrainRecord:
        """Return the record of an iteration, with the mean outputs of the train nets."""
        sums: dict[str, torch.Tensor] = {}
        for net in nets:
            accumulate(sums, _outputs(net))
        means = {name: total / len(nets) for name, total in sums.items()}
        return TrainRecord(
            iteration=iteration,
            loss=self._smoothed.value,
            elapsed_s=self._elapsed_s,
            outputs=named_values(means, nets[0].blob_loss_weights),
            rate=rate,
        )

    def test(self, net: Net, index: int, iteration: int, param: SolverParameter) -> None:
        """Run a test net for its test_iter batches and log the averages."""
        LOG.begin_test(iteration, index)
        sums: dict[str, torch.Tensor] = {}
        loss = 0.0
        tally, version = DetectionTally(), self._settings.ap_version
        for batch in range(param.test_iter[index]):
            loss += net._forward(0, len(net.layers) - 1)
            if version is not None:
                tally.add(batch, _outputs(net))
            else:
                accumulate(sums, _outputs(net))
        classes: tuple[Classes, ...] = ()
        if version is not None:
            outputs, classes = tally.scores(net.outputs, version)
        else:
            means = {name: total / param.test_iter[index] for name, total in sums.items()}
            outputs = named_values(means, net.blob_loss_weights)
        LOG.on_test(
            TestRecord(
                iteration=iteration,
                net=index,
                elapsed_s=self._elapsed_s,
                outputs=outputs,
                loss=loss / param.test_iter[index] if param.test_compute_loss else None,
                classes=classes if self._settings.param.show_per_class_result else (),
            )
        )


class SolverSnapshots:
    """The snapshots that a solver writes.

    Attributes:
        restored: the state that the solver has continued from.
    """

    def __init__(self, definition: SolverDefinition) -> None:
        self._definition = definition
        self._prefixes = Prefixes(current_context().job.name)
        self.restored: Path | None = None

    def write(self, net: Net, iteration: int, histories: tuple[tuple[Array, ...], ...]) -> None:
        """Write a model and a state; see `Solver.snapshot`."""
        param, prefix = self._definition.param, _prefix(self._definition)
        hdf5 = param.snapshot_format == SolverParameter.HDF5
        model, state = (path(prefix, iteration, hdf5=hdf5) for path in (model_path, state_path))
        make_folder(prefix.parent)
        ending = state.name.removeprefix(f"{prefix.name}_iter_{iteration}")
        own = self._prefixes.take(prefix.absolute(), ending, self.restored)
        LOG.write(*snapshotting(str(model), str(state)))
        save = net.save_hdf5 if hdf5 else net.save
        save(model, param.snapshot_diff)
        run = RunState(
            iteration=iteration,
            model=str(model),
            histories=histories,
            current_step=current_step(param, iteration),
        )
        write_state(state, run)
        seal(state, model, run=own)


def _prefix(definition: SolverDefinition) -> Path:
    """Return the prefix of snapshots, relative to the current folder as in Caffe;
    by default the name of the solver file.
    """
    prefix_text = definition.param.snapshot_prefix
    if not prefix_text or Path(prefix_text).parts[0] in PLACEHOLDERS:
        return definition.snapshot_prefix()
    prefix = Path(prefix_text).absolute()
    is_folder = prefix.is_dir() or prefix_text.endswith("/")
    return prefix / Path(definition.source).stem if is_folder else prefix


def _outputs(net: Net) -> dict[str, torch.Tensor]:
    """Return the net's outputs by name, as views."""
    return {name: torch.from_numpy(net.blobs[name].data) for name in net.outputs}
