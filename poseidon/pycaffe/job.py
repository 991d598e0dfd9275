"""The solver of a worker of `poseidon run`: the job's exchange averages its diffs, and the job
continues from memory after a loss.

Law: the mean of the diffs has the bits of `Gloo` outside of a job. A memory snapshot is taken where
the solver begins an iteration, before its tests. A solver that takes it continues with the values,
histories, iteration, positions of readers and random states of the undisturbed job.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from poseidon.base.call_names import STEP
from poseidon.caffe.proto.caffe_pb2 import PoseidonWorkerState
from poseidon.caffe.solver.replica import WorkerNets
from poseidon.caffe.solver.state import restore, state_of
from poseidon.engine.exchange_leaves import ExchangeLeaves
from poseidon.engine.leaf import MEMORY, Found, Leaf, LeafStage, Scope, packed
from poseidon.engine.loop_table import LoopEvent
from poseidon.engine.mean_loop import MeanLoop
from poseidon.engine.memory import StopRequested
from poseidon.engine.state_tree import StateTree
from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import UsageError
from poseidon.exchange.base import Trained
from poseidon.exchange.broadcast import broadcast_parameters
from poseidon.pycaffe.solver import Solver
from ps_server import Rule, RuleKind


class JobMember(MeanLoop):
    """The solver of one worker among the solvers of its job; the worker's `Loop`, and a `SolverJob`.

    Raises:
        UsageError: the script or the job has settings that do not fit the other's.
    """

    def __init__(self, solver: Solver, context: WorkerContext) -> None:
        self._solver = solver
        self._contributions = contributions = solver._contributions
        super().__init__(_checked(solver, context).of_next_loop())
        self._blobs = [blob for _, blob in solver.net._built.learned_blobs()]
        self._tensors = [
            Trained(
                name=info.name,
                tensor=torch.zeros_like(tensor),
                rule=Rule() if info.statistics else Rule(kind=RuleKind.MEAN),
                statistics=info.statistics,
                looked_up=info.looked_up,
            )
            for info, tensor in zip(contributions.infos, contributions.tensors(0), strict=True)
        ]
        context = self._context
        context.reducers.append(self)
        net = solver.net._built.compiled
        self._open(context, self._tensors, net, iterations=solver.iter)
        self._set_iterations(solver.iter)
        self._tree = StateTree(context.member)
        self._tree.add(self._leaves())
        context.loops.add(self)
        self.is_brought = False
        solver._job = self

    def is_asked_for_snapshot(self) -> bool:
        return self._exchange.control.is_asked_for_snapshot(self._session.iterations)

    def bcast(self) -> None:
        """Bring all solvers to the values of rank 0; in a start that continues from memory to the
        whole state in its snapshot, if this is the job's first solver and has not begun.
        """
        self._context.check_start()
        memory, collections = self._context.loop_memory, self._collections
        rank = self._context.rank
        has_begun = self._session.has_begun
        with collections.calling("bcast"):
            if memory is not None and memory.resume() and not has_begun:
                state = self._tree.brought(memory.content, MEMORY, collections.gather)
                self._tree.write(state, MEMORY, self._reopen)
                self._session.on(LoopEvent.LOAD)
                return
            values = [blob.write_data() for blob in self._blobs]
            broadcast_parameters(values, collections.gather, rank=rank)
        if not has_begun and self._solver.iter != self._session.iterations:  # it was restored
            self._set_iterations(self._solver.iter)
            self._reopen()

    def average(self) -> None:
        """Set the diffs and statistics of the first net to the means over all virtual workers."""
        with self._collections.calling(STEP):
            if not self._session.has_begun:
                self._on(LoopEvent.FORWARD)
                self._take_means()
            self._on(LoopEvent.BACKWARD)
            self._end_pass()
            self._collections.finish_step()
        own = self._contributions.tensors(0)
        for trained, tensor in zip(self._tensors, own, strict=True):
            tensor.copy_(trained.tensor)
        self._contributions.averaged = True

    def _take_means(self) -> None:
        for index in range(len(self._tensors)):
            self._exchange.wait(index)

    def _send_rest(self) -> None:
        for position in range(len(self._solver.nets)):
            if position:
                self._exchange.next_virtual_worker()
            own = self._contributions.tensors(position)
            for index, (trained, tensor) in enumerate(zip(self._tensors, own, strict=True)):
                if trained.statistics:
                    trained.tensor.copy_(tensor)
                else:
                    self._exchange.begin(index, tensor)

    def _finish(self) -> None:
        with self._collections.ending_iteration(lambda: self._exchange.finished):
            self._exchange.finish()

    def leave(self) -> None:
        """Leave the job. A second call does nothing."""
        if self._session.on(LoopEvent.CLOSE):
            self._context.loops.remove(self)
            super().close()

    def close(self) -> None:
        """Leave, and stop reading data: the script has ended."""
        self.leave()
        for net in (*self._solver.nets, *self._solver.test_nets):
            net._built.compiled.close()

    def _set_iterations(self, iterations: int) -> None:
        self._session.continue_from(steps=iterations, iterations=iterations)

    def between(self) -> None:
        """See `SolverJob`."""
        self.is_brought = False
        self._context.check_start()
        memory, iterations = self._context.loop_memory, self._session.iterations
        is_whole = len(self._context.loops.open) <= 1
        if memory is not None and memory.enters(iterations) and is_whole:
            with self._collections.calling(STEP):
                memory.between(
                    lambda keeps: packed(self._tree.read(self._collections.gather, keeps=keeps)),
                    self._collections.gather,
                    regroups=self._exchange.control.is_asked_to_regroup(iterations),
                )
        stops = self.is_asked_to_stop()
        if stops or self.is_asked_for_snapshot():
            self._solver._snapshot_of_all()
        if stops:
            raise StopRequested(f"the job was asked to stop after iteration {iterations}")

    def _nets(self) -> Iterator[WorkerNets]:
        """Yield the nets of each virtual worker of this process. Virtual worker 0, which is rank
        0's, has the test nets.
        """
        solver = self._solver
        for net, number in zip(solver.nets, self._contributions.own, strict=True):
            tests = solver.test_nets if number == 0 else []
            yield WorkerNets(
                number=number,
                name=f"virtual worker {number}",
                train=net._built.compiled,
                tests=tuple(test._built.compiled for test in tests),
            )

    def _leaves(self) -> list[Leaf]:
        """Return the state of the job after an iteration."""
        solver = self._solver
        return [
            Leaf.shared("iter", lambda: solver.iter, self._load_iter),
            Leaf.shared(
                "iterations",
                lambda: self._session.iterations,
                self._set_iterations,
                stage=LeafStage.EXCHANGE,
            ),
            Leaf.shared(
                "values",
                lambda: [blob.read_data().cpu() for blob in self._blobs],
                self._load_values,
                stage=LeafStage.MODULE,
            ),
            Leaf.shared(
                "histories",
                lambda: [[*map(torch.from_numpy, own)] for own in solver._updater.histories()],
                lambda histories: solver._updater.set_histories(
                    [[array.numpy() for array in history] for history in histories]
                ),
                stage=LeafStage.UPDATE,
            ),
            ExchangeLeaves(self._tensors, self._exchange, own=self._tree.own).held_back(),
            Leaf(name="tests", scope=Scope.ROOT, read=self._tests, write=self._load_tests),
            Leaf(
                name="worker",
                scope=Scope.VIRTUAL,
                read=lambda: [state_of(nets, ()).SerializeToString() for nets in self._nets()],
                write=self._load_workers,
            ),
        ]

    def _load_iter(self, iterations: int) -> None:
        self._solver.iter, self.is_brought = iterations, True

    def _load_values(self, values: list[Tensor]) -> None:
        for blob, value in zip(self._blobs, values, strict=True):
            blob.write_data().copy_(value)

    def _tests(self) -> list[dict[str, int]]:
        return [
            {name: reader.batches_done for name, reader in test._built.compiled.readers()}
            for test in self._solver.test_nets
        ]

    def _load_tests(self, found: Found) -> None:
        for test, batches in zip(self._solver.test_nets, found.shared, strict=True):
            for name, reader in test._built.compiled.readers():
                reader.skip_to(batches[name])

    def _load_workers(self, found: Found) -> None:
        for nets in self._nets():
            restore(nets, PoseidonWorkerState.FromString(found.each[nets.number]))

    def _reopen(self) -> None:
        self._exchange.open(None, self._session.iterations)


def _checked(solver: Solver, context: WorkerContext) -> WorkerContext:
    """Return the context with the virtual workers of the solver."""
    contributions, member = solver._contributions, context.member
    placed, options = contributions.placed, member.options
    if (contributions.process, placed.processes) != (context.rank, context.size):
        raise UsageError(
            f"the solver is number {contributions.process} of {placed.processes}, but its worker "
            f"is number {context.rank} of {context.size}; do not call set_solver_rank() or "
            "set_solver_count() in a script of `poseidon run`"
        )
    if options.staleness or options.local_steps:
        raise UsageError(
            "a solver of pycaffe averages its diffs in each iteration; it needs --staleness=0 and "
            "no --local_steps"
        )
    if member.virtual_workers is None and not placed.is_one_each:
        member = replace(member, virtual_workers=placed)
    return replace(context, member=member)
