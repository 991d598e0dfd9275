"""Caffe's solvers for pycaffe.

Law: the semantics are as in Caffe's Solver::Step and Solve in one process. The weights after n
iterations equal the weights of `poseidon train` with one worker and the same initial weights. Test
nets share the weights of the train net.

With virtual workers (`set_virtual_workers`) the solver has a train net for each one of this
process, which share the weights. It runs them one after another, and applies the mean of the diffs
over all virtual workers. With several processes, only rank 0 tests and writes snapshots, as in Caffe.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

from poseidon.caffe.proto.caffe_pb2 import SolverParameter
from poseidon.caffe.proto.definition import SolverDefinition, read_solver
from poseidon.caffe.snapshot.solverstate import learned_net, read_state
from poseidon.caffe.solver.settings import oddities, solver_settings
from poseidon.caffe.tools.preflight import weight_files
from poseidon.engine.snapshot_files import check
from poseidon.errors import UsageError
from poseidon.observe.metrics.glog_lines import done, last, solving
from poseidon.pycaffe.mode import (
    ProcessSeeds,
    acting_as,
    context_of,
    log,
    next_seed,
    placed_virtual_workers,
)
from poseidon.pycaffe.net import FileMissing, Net
from poseidon.pycaffe.net_base import NetVec
from poseidon.pycaffe.solver_output import LOG, SolverLog, SolverSnapshots
from poseidon.pycaffe.update import ReplicaContributions, Updater, load_weights
from ps_server import RuleKind

Callback = Callable[[], Any]
LOGGER = logging.getLogger("poseidon.solver")


class SolverJob(Protocol):
    """The job of a solver.

    Attributes:
        is_brought: whether the solver's state belongs to a job that continues, and no iteration has
            begun since.
    """

    is_brought: bool

    def between(self) -> None:
        """Do what belongs between two iterations."""


class Solver:
    """The base class of solvers. The file determines its type; see `get_solver`.

    Args:
        solver_file: the definition of the solver.

    Attributes:
        net: the train net; of several virtual workers the first one's.
        nets: the train nets of the virtual workers of this process, in order.
        iter: the number of finished iterations.
        param: the definition. Changes of its rates affect the next steps.
    """

    KIND: ClassVar[RuleKind | None] = None

    def __init__(self, solver_file: str | os.PathLike[str]) -> None:
        definition = _read(Path(solver_file))
        if self.KIND is not None:
            # The class takes precedence over the file, as in pycaffe.
            definition.param.type = self.KIND.value
            definition.param.ClearField("solver_type")
        self._definition = definition
        self._settings = solver_settings(definition)
        for oddity in oddities(definition, endless=True):
            LOGGER.warning("%s", oddity)
        self.iter = 0
        placed, process = placed_virtual_workers()
        # layers in Python set rank and count for their virtual worker
        with acting_as(process, placed.processes):
            self._make_nets(placed.of(process), placed.count)
        self._contributions = ReplicaContributions(
            [net._built for net in self.nets], placed, process
        )
        self._updater = Updater(self.net._built, self._settings)
        self._log = SolverLog(self._settings)
        self._callbacks: list[tuple[Callback, Callback]] = []
        self._job: SolverJob | None = None
        self._snapshots = SolverSnapshots(definition)

    def _make_nets(self, numbers: range, count: int) -> None:
        """Make the nets of the virtual workers with these numbers, of so many of the job."""
        definition, seed = self._definition, self._settings.random_seed
        train = definition.net_definition()
        state = definition.train_state(train)
        self._seeds = ProcessSeeds(next_seed(seed), train)
        self.nets = []
        for number in numbers:
            self._seeds.put("setup", number)
            context = context_of(state.phase, self._seeds.job, rank=number, workers=count)
            self.nets.append(Net.from_definition(train, state, context))
        self.test_nets: list[Net] = NetVec(
            Net.from_definition(
                test.definition,
                test.state,
                # one process tests, so it reads all batches
                context_of(test.state.phase, next_seed(seed), rank=0, workers=1),
            )
            for test in definition.test_nets()
        )
        for net in (*self.nets[1:], *self.test_nets):
            net.share_with(self.net)
        for model in weight_files(definition, ()):
            for net in (self.net, *self.test_nets):
                net.copy_from(model)

    @property
    def param(self) -> SolverParameter:
        return self._definition.param

    @property
    def net(self) -> Net:
        return self.nets[0]

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
        self._log.restart()
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
        if settings.saves_at_end(self.iter):
            self._snapshot_of_all()
        if settings.shows(self.iter):
            self._log.add(self._last_loss())
            LOG.write(*last(self._log.record(self.nets, self.iter, self.lr)))
        if self._test_is_due(first=True):
            self.test_all()
        LOG.write(done())

    def apply_update(self) -> None:
        """Update the weights from the diffs, as the end of iteration `iter`."""
        self._updater.apply(self.iter)
        self.iter += 1

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
        for index, net in enumerate(self.test_nets):
            net.share_with(self.net)
            self._log.test(net, index, self.iter, self.param)

    def snapshot(self) -> None:
        """Write `<prefix>_iter_<iter>.caffemodel` and `.solverstate`, in the solver's
        snapshot_format.

        Raises:
            SnapshotError: a file cannot be written, or another job that runs writes with this
                prefix.
        """
        self._snapshots.write(self.net, self.iter, self._updater.histories())

    def restore(self, state_file: str | os.PathLike[str]) -> None:
        """Restore weights, history and iteration from a snapshot.

        The position of data layers does not change. It does nothing right after `Gloo.bcast` in a
        job that continues from memory: the state there is newer.

        Raises:
            SnapshotError: the state or its weights are missing, damaged or of a different net. If
                it is the state, nothing has changed.
        """
        if self._job is not None and self._job.is_brought:
            log(f"the job continues at iteration {self.iter} from memory, not from {state_file}")
            return
        path = Path(state_file)
        check(path)
        state = read_state(path, self._updater.specs, self._updater.arrays_per_blob)
        load_weights(self.net._built, learned_net(state, path), own=True)
        self._updater.set_histories(state.histories)
        self.iter = state.iteration
        self._snapshots.restored = path

    def _iterate(self) -> None:
        settings = self._settings
        if self._job is not None:
            self._job.between()
        for net in self.nets:
            net.clear_param_diffs()
        if self._test_is_due(first=settings.param.test_initialization):
            self.test_all()
        for on_start, _ in self._callbacks:
            on_start()
        shows = settings.shows(self.iter)
        if settings.param.debug_info:
            self.net._set_debug_info(shows)
        self._contributions.begin()
        numbers = self._contributions.own
        losses = [
            self._forward_backward(net, number)
            for net, number in zip(self.nets, numbers, strict=True)
        ]
        self._log.add(sum(losses) / len(losses))
        if shows:
            LOG.on_train(self._log.record(self.nets, self.iter, self.lr))
        for _, on_gradients_ready in self._callbacks:
            on_gradients_ready()
        self._contributions.average_alone()
        self.apply_update()
        if settings.saves(self.iter):
            self._snapshot_of_all()

    def _forward_backward(self, net: Net, number: int) -> float:
        """Run the passes of a virtual worker; return its mean loss."""
        self._seeds.put("train", number, self.iter)
        end = len(net.layers) - 1
        loss = 0.0
        for _ in range(self._settings.iter_size):
            loss += net._forward(0, end)
            net._backward(end, 0)
        return loss / self._settings.iter_size

    def _last_loss(self) -> float:
        """Return the mean loss of one more forward pass, which Caffe's last line counts."""
        self._contributions.begin()
        numbers = self._contributions.own
        losses = []
        for net, number in zip(self.nets, numbers, strict=True):
            self._seeds.put("last", number)
            losses.append(net._forward(0, len(net.layers) - 1))
        return sum(losses) / len(losses)

    def _snapshot_of_all(self) -> None:
        """Write a snapshot if this is the process of rank 0."""
        if self._contributions.process == 0:
            self.snapshot()

    def _test_is_due(self, *, first: bool) -> bool:
        is_root = self._contributions.process == 0
        return is_root and self._settings.tests(self.iter, first=first)


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


_CLASSES = {kind.KIND: kind for kind in Solver.__subclasses__()}


def get_solver(solver_file: str | os.PathLike[str]) -> Solver:
    """Create a solver of the class for the type in its file.

    Raises:
        DefinitionError: a mistake in the solver or its nets.
    """
    path = Path(solver_file)
    return _CLASSES[solver_settings(_read(path)).base_rule.kind](path)


def _read(path: Path) -> SolverDefinition:
    if not path.is_file():
        raise FileMissing("there is no such solver definition", source=str(path))
    return read_solver(path)
