"""Caffe's solvers for pycaffe.

Law: the semantics are those of Caffe's Solver::Step and Solve in one process. Weights after n
iterations equal those of `poseidon train` with one worker and the same initial weights. Test nets
share the weights of the train net.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

from poseidon.engine.averages import SmoothedLoss, accumulate, named_values
from poseidon.engine.detection import DetectionTally
from poseidon.errors import UsageError
from poseidon.metrics.glog_lines import GlogSink, done, last, snapshotting, solving
from poseidon.metrics.record import Output, TestRecord, TrainRecord
from poseidon.proto.caffe_pb2 import SolverParameter
from poseidon.proto.definition import SolverDefinition, TestNet, read_solver
from poseidon.proto.paths import PLACEHOLDERS
from poseidon.pycaffe.graph.update import Updater
from poseidon.pycaffe.net import FileMissing, Net
from poseidon.snapshot.checksums import check, seal
from poseidon.snapshot.files import make_folder, model_path, state_path
from poseidon.snapshot.solverstate import RunState, learned_net, read_state, write_state
from poseidon.solvers.rate import current_step
from poseidon.solvers.settings import solver_settings
from ps_server import RuleKind

Callback = Callable[[], Any]
LOG = GlogSink(logging.getLogger("poseidon.solver"))


class Solver:
    """The base class of solvers. Its type is that of the file; see `get_solver`.

    Args:
        solver_file: the definition of the solver.

    Attributes:
        net: the train net.
        test_nets: the test nets.
        iter: the number of finished iterations.
        param: the definition. Changes of its rates affect the next steps.
    """

    KIND: ClassVar[RuleKind | None] = None

    def __init__(self, solver_file: str | os.PathLike[str]) -> None:
        path = Path(solver_file)
        if not path.is_file():
            raise FileMissing("there is no such solver definition", source=str(path))
        definition = read_solver(path)
        if self.KIND is not None:
            # The class takes precedence over the file, as in pycaffe.
            definition.param.type = self.KIND.value
            definition.param.ClearField("solver_type")
        self._definition = definition
        self._settings = solver_settings(definition, endless=True)
        self.param: SolverParameter = definition.param
        self.iter = 0
        train = definition.net_definition()
        seed = self._settings.random_seed
        self.net = Net.from_definition(train, definition.train_state(train), seed)
        self._tests: tuple[TestNet, ...] = definition.test_nets()
        for weights in self.param.weights:
            for part in filter(None, weights.split(",")):
                self.net.copy_from(definition.resolve(part))
        self.test_nets = [
            Net.from_definition(test.definition, test.state, seed) for test in self._tests
        ]
        for net in self.test_nets:
            net.share_with(self.net)
        self._updater = Updater(self.net._built, self._settings)
        self._smoothed = SmoothedLoss(self._settings.average_loss)
        self._callbacks: list[tuple[Callback, Callback]] = []
        self._began_s = time.monotonic()

    @property
    def type(self) -> str:
        """The solver type, as in a definition."""
        return self._settings.base_rule.kind.value

    @property
    def lr(self) -> float:
        """The learning rate of the next iteration."""
        return self._settings.rate(self.iter)

    def step(self, iterations: int) -> None:
        """Train for a number of iterations, with the tests, displays and snapshots of the solver.

        Raises:
            UsageError: the number is negative.
        """
        if iterations < 0:
            raise UsageError(f"step({iterations}): expected 0 or more iterations")
        self._smoothed = SmoothedLoss(self._settings.average_loss)
        for _ in range(iterations):
            self._iterate()

    def solve(self, resume_file: str | os.PathLike[str] | None = None) -> None:
        """Train to max_iter.

        Args:
            resume_file: a `.solverstate` to resume from.

        Raises:
            SnapshotError: a snapshot cannot be read or written.
        """
        settings = self._settings
        LOG.write(solving(self.net.name))
        if resume_file is not None:
            self.restore(resume_file)
        self.step(max(0, settings.max_iter - self.iter))
        if settings.snapshot_after_train and not (
            settings.snapshot and self.iter % settings.snapshot == 0
        ):
            self.snapshot()
        if settings.display and self.iter % settings.display == 0:
            loss = self.net._forward(0, len(self.net.layers) - 1)
            LOG.write(last(self.iter, loss, self._elapsed_s()))
        if self._test_is_due(first=True):
            self.test_all()
        LOG.write(done())

    def apply_update(self) -> None:
        """Update the weights from the diffs as in iteration `iter`, without changing `iter`."""
        self._updater.apply(self.iter)

    def add_callback(self, on_start: Any, on_gradients_ready: Callback | None = None) -> None:
        """Register functions to be called in each iteration, before its forward pass and before
        its update.

        Args:
            on_start: a function, or an object with methods `on_start` and `on_gradients_ready`.
            on_gradients_ready: a function, unless the first argument is an object.
        """
        if on_gradients_ready is None:
            on_start, on_gradients_ready = on_start.on_start, on_start.on_gradients_ready
        self._callbacks.append((on_start, on_gradients_ready))

    def share_weights(self, net: Net) -> None:
        """Let a net share the memory of this solver's weights."""
        net.share_with(self.net)

    def test_all(self) -> None:
        """Run every test net for its test_iter batches and log the averages."""
        for index in range(len(self.test_nets)):
            self._test(index)

    def snapshot(self) -> None:
        """Write `<prefix>_iter_<iter>.caffemodel` and `.solverstate`, in the solver's
        snapshot_format.

        Raises:
            SnapshotError: a file cannot be written.
        """
        hdf5 = self.param.snapshot_format == SolverParameter.HDF5
        prefix = _prefix(self._definition)
        model, state = (
            model_path(prefix, self.iter, hdf5=hdf5),
            state_path(prefix, self.iter, hdf5=hdf5),
        )
        LOG.write(*snapshotting(str(model), str(state)))
        make_folder(prefix.parent)
        save = self.net.save_hdf5 if hdf5 else self.net.save
        save(model, self.param.snapshot_diff)
        run = RunState(
            iteration=self.iter,
            model=str(model),
            histories=self._updater.histories(),
            current_step=current_step(self.param, self.iter),
        )
        write_state(state, run)
        seal(state, model)

    def restore(self, state_file: str | os.PathLike[str]) -> None:
        """Restore weights, history and iteration from a snapshot.

        The position of data layers does not change.

        Raises:
            SnapshotError: the state or its weights are missing, damaged or of another net. If it is
                the state, nothing has changed.
        """
        path = Path(state_file)
        check(path)
        state = read_state(path, self._updater.specs, self._updater.arrays_per_blob)
        self.net.copy_from(learned_net(state, path))
        self._updater.set_histories(state.histories)
        self.iter = state.iteration

    def _iterate(self) -> None:
        settings, net = self._settings, self.net
        net.clear_param_diffs()
        if self._test_is_due(first=settings.test_initialization):
            self.test_all()
        for on_start, _ in self._callbacks:
            on_start()
        end = len(net.layers) - 1
        loss = 0.0
        for _ in range(settings.iter_size):
            loss += net._forward(0, end)
            net._backward(end, 0)
        self._smoothed.add(torch.tensor(loss / settings.iter_size))
        if settings.display and self.iter % settings.display == 0:
            self._display()
        for _, on_gradients_ready in self._callbacks:
            on_gradients_ready()
        self.apply_update()
        self.iter += 1
        if settings.snapshot and self.iter % settings.snapshot == 0:
            self.snapshot()

    def _test_is_due(self, *, first: bool) -> bool:
        interval = self._settings.test_interval
        due = bool(interval) and bool(self.test_nets) and self.iter % interval == 0
        return due and (self.iter > 0 or first)

    def _test(self, index: int) -> None:
        net, iterations = self.test_nets[index], self._tests[index].iterations
        net.share_with(self.net)
        LOG.begin_test(self.iter, index)
        sums: dict[str, torch.Tensor] = {}
        loss = 0.0
        tally, version = DetectionTally(), self._settings.ap_version
        for batch in range(iterations):
            loss += net._forward(0, len(net.layers) - 1)
            if version is not None:
                tally.add(batch, _outputs(net))
            else:
                accumulate(sums, _outputs(net))
        if version is not None:
            scores = tally.scores(net.outputs, version)
            outputs = tuple(Output(name=score.name, value=score.mean) for score in scores)
            shows = self._settings.show_per_class_result
            classes = tuple(score.classes for score in scores) if shows else ()
        else:
            classes = ()
            means = {name: total / iterations for name, total in sums.items()}
            outputs = named_values(means, net.blob_loss_weights)
        LOG.on_test(
            TestRecord(
                iteration=self.iter,
                net=index,
                elapsed_s=self._elapsed_s(),
                outputs=outputs,
                loss=loss / iterations if self.param.test_compute_loss else None,
                classes=classes,
            )
        )

    def _display(self) -> None:
        net = self.net
        LOG.on_train(
            TrainRecord(
                iteration=self.iter,
                loss=self._smoothed.value,
                elapsed_s=self._elapsed_s(),
                outputs=named_values(_outputs(net), net.blob_loss_weights),
                rate=self.lr,
            )
        )

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s


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


class SGDSolver(Solver):
    """Stochastic gradient descent with momentum."""

    KIND = RuleKind.SGD


class NesterovSolver(Solver):
    """Nesterov's accelerated gradient."""

    KIND = RuleKind.NESTEROV


class AdaGradSolver(Solver):
    """AdaGrad (Duchi et al., 2011)."""

    KIND = RuleKind.ADAGRAD


class RMSPropSolver(Solver):
    """RMSProp (Tieleman and Hinton, 2012)."""

    KIND = RuleKind.RMSPROP


class AdaDeltaSolver(Solver):
    """AdaDelta (Zeiler, 2012)."""

    KIND = RuleKind.ADADELTA


class AdamSolver(Solver):
    """Adam (Kingma and Ba, 2015)."""

    KIND = RuleKind.ADAM


_CLASSES: dict[RuleKind, type[Solver]] = {
    RuleKind.SGD: SGDSolver,
    RuleKind.NESTEROV: NesterovSolver,
    RuleKind.ADAGRAD: AdaGradSolver,
    RuleKind.RMSPROP: RMSPropSolver,
    RuleKind.ADADELTA: AdaDeltaSolver,
    RuleKind.ADAM: AdamSolver,
}


def get_solver(solver_file: str | os.PathLike[str]) -> Solver:
    """Create a solver of the class for the type in its file.

    Raises:
        DefinitionError: a mistake in the solver or its nets.
    """
    path = Path(solver_file)
    if not path.is_file():
        raise FileMissing("there is no such solver definition", source=str(path))
    return _CLASSES[solver_settings(read_solver(path), endless=True).base_rule.kind](path)
