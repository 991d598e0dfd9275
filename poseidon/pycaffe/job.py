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

from poseidon.caffe.proto.caffe_pb2 import PoseidonWorkerState
from poseidon.caffe.solver.replica import WorkerNets
from poseidon.caffe.solver.worker_state import restore, state_of
from poseidon.errors import UsageError
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.broadcast import broadcast_bytes, broadcast_parameters, gather_bytes
from poseidon.pycaffe.solver import Solver
from poseidon.torch.checkpoint_file import packed, unpacked
from poseidon.torch.group_collections import GroupCollections
from poseidon.torch.memory import ScriptMemory
from poseidon.torch.worker_context import STEP, WorkerContext
from ps_server import Rule, RuleKind

SOURCE = "the memory snapshot"


class JobMember:
    """The solver of one worker among the solvers of its job; the worker's `Loop`.

    Raises:
        UsageError: the script or the job has settings that do not fit the other's.
    """

    def __init__(self, solver: Solver, context: WorkerContext) -> None:
        self._solver = solver
        self._contributions = contributions = solver._contributions
        self._context = context = _checked(solver, context).of_next_loop()
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
        built, self._observed = context.build(
            self._tensors, ExchangeSettings(start_clock=solver.iter), solver.net._built.compiled
        )
        context.reducers.append(self)
        self._exchange = self._observed.exchange
        self._collections = GroupCollections(
            self._exchange.control,
            context.on_progress,
            rank=context.worker.rank,
            place=lambda: f"after iteration {solver.iter}",
        )
        self._begun = False
        self._exchange.open(None)
        self._set_iterations(solver.iter)
        context.loops.add(self)
        context.on_open(built, self._exchange)
        solver._between = self._between

    def is_asked_to_stop(self) -> bool:
        return self._exchange.control.is_asked_to_stop(self._collections.iterations)

    def is_asked_for_snapshot(self) -> bool:
        return self._exchange.control.is_asked_for_snapshot(self._collections.iterations)

    def bcast(self) -> None:
        """Bring all solvers to the values of rank 0; in a start that continues from memory to the
        whole state in its snapshot, if this is the job's first solver and has not begun.
        """
        self._context.check_start()
        memory, rank, collections = self._memory, self._context.worker.rank, self._collections
        with collections.calling("bcast"):
            if memory is not None:
                memory.resumes = True
            if memory is not None and memory.rewinds and not self._begun:
                content = memory.newest.content if rank == 0 and memory.newest else None
                found = broadcast_bytes(content, collections.gather, rank=rank)
                assert found is not None, "worker 0 has its snapshot"
                self._load(found)
                return
            values = [blob.write_data() for blob in self._blobs]
            broadcast_parameters(values, collections.gather, rank=rank)
        if not self._begun and self._solver.iter != collections.iterations:  # it was restored
            self._exchange.open(None, self._solver.iter)
            self._set_iterations(self._solver.iter)

    def average(self) -> None:
        """Set the diffs and statistics of the first net to the means over all virtual workers."""
        exchange, collections = self._exchange, self._collections
        with collections.calling(STEP):
            if not self._begun:
                self._begin()
            for position in range(len(self._solver.nets)):
                if position:
                    exchange.next_virtual_worker()
                own = self._contributions.tensors(position)
                for index, (trained, tensor) in enumerate(zip(self._tensors, own, strict=True)):
                    if trained.statistics:
                        trained.tensor.copy_(tensor)
                    else:
                        exchange.begin(index, tensor)
            with collections.ending_iteration(lambda: exchange.finished):
                exchange.finish()
            collections.finish_step()
            self._begin()
        own = self._contributions.tensors(0)
        for trained, tensor in zip(self._tensors, own, strict=True):
            tensor.copy_(trained.tensor)
        self._contributions.averaged = True

    def leave(self) -> None:
        """Leave the job. A second call does nothing."""
        if self in self._context.loops.open:
            self._context.loops.open.remove(self)
        self._observed.close()

    def close(self) -> None:
        """Leave, and stop reading data: the script has ended."""
        self.leave()
        for net in (*self._solver.nets, *self._solver.test_nets):
            net._built.compiled.close()

    @property
    def _memory(self) -> ScriptMemory | None:
        return self._context.memory if self._context.number == 0 else None

    def _begin(self) -> None:
        """Begin an iteration of the exchange, with the means of the one before."""
        self._begun = True
        self._exchange.start(self._collections.iterations, 0.0)
        for index in range(len(self._tensors)):
            self._exchange.wait(index)

    def _set_iterations(self, iterations: int) -> None:
        self._collections.steps = self._collections.iterations = iterations

    def _between(self) -> None:
        """Do what belongs between two iterations."""
        self._context.check_start()
        memory, iterations = self._memory, self._collections.iterations
        is_whole = len(self._context.loops.open) <= 1
        if memory is not None and memory.enters(iterations) and is_whole:
            with self._collections.calling(STEP):
                memory.between(
                    lambda: self._content(keeps=memory.holds),
                    self._collections.gather,
                    regroups=self._exchange.control.is_asked_to_regroup(iterations),
                )
        stops = self.is_asked_to_stop()
        if stops or self.is_asked_for_snapshot():
            self._solver._snapshot_of_all()
        if stops:
            raise KeyboardInterrupt(f"the job was asked to stop after iteration {iterations}")

    def _nets(self) -> Iterator[WorkerNets]:
        """Yield the nets of each virtual worker of this process. Virtual worker 0, which is rank
        0's, has the test nets.
        """
        solver, placed = self._solver, self._contributions.placed
        for net, number in zip(solver.nets, placed.of(self._contributions.process), strict=True):
            tests = solver.test_nets if number == 0 else []
            yield WorkerNets(
                number=number,
                name=f"virtual worker {number}",
                train=net._built.compiled,
                tests=tuple(test._built.compiled for test in tests),
            )

    def _content(self, *, keeps: bool) -> bytes:
        """Return the state of the job after an iteration, where it is kept."""
        solver = self._solver
        own = {
            "workers": [state_of(nets, ()).SerializeToString() for nets in self._nets()],
            "tests": [
                {name: reader.batches_done for name, reader in test._built.compiled.readers()}
                for test in solver.test_nets
            ],
            "held_back": {
                name: torch.tensor(array)
                for name, array in self._exchange.state.held_back().items()
            },
        }
        parts = gather_bytes(packed(own), self._collections.gather, keeps=keeps)
        if not keeps:
            return b""
        histories = solver._updater.histories()
        return packed(
            {
                "iter": solver.iter,
                "iterations": self._collections.iterations,
                "values": [blob.read_data().cpu() for blob in self._blobs],
                "histories": [[torch.from_numpy(a) for a in history] for history in histories],
                "parts": parts,
            }
        )

    def _load(self, content: bytes) -> None:
        """Bring this solver to a state that `_content` has returned."""
        solver, state = self._solver, unpacked(content, SOURCE)
        parts = [unpacked(part, SOURCE) for part in state["parts"]]
        workers = [one for part in parts for one in part["workers"]]
        for nets in self._nets():
            restore(nets, PoseidonWorkerState.FromString(workers[nets.number]))
        for test, batches in zip(solver.test_nets, parts[0]["tests"], strict=True):
            for name, reader in test._built.compiled.readers():
                reader.skip_to(batches[name])
        for blob, value in zip(self._blobs, state["values"], strict=True):
            blob.write_data().copy_(value)
        solver._updater.set_histories(
            [[array.numpy() for array in history] for history in state["histories"]]
        )
        solver.iter, solver._is_brought = state["iter"], True
        self._exchange.state.hold_back(
            {
                name: tensor.numpy()
                for part in reversed(parts)  # what the shards hold back is rank 0's
                for name, tensor in part["held_back"].items()
            }
        )
        self._exchange.open(None, state["iterations"])
        self._set_iterations(state["iterations"])


def _checked(solver: Solver, context: WorkerContext) -> WorkerContext:
    """Return the context with the virtual workers of the solver."""
    contributions, worker, member = solver._contributions, context.worker, context.member
    placed, options = contributions.placed, member.options
    if (contributions.process, placed.processes) != (worker.rank, worker.size):
        raise UsageError(
            f"the solver is number {contributions.process} of {placed.processes}, and its worker "
            f"number {worker.rank} of {worker.size}; a script of `poseidon run` sets neither "
            "set_solver_rank() nor set_solver_count()"
        )
    if options.staleness or options.local_steps:
        raise UsageError(
            "a solver of pycaffe averages its diffs in each iteration; expected "
            "--staleness=0 and no --local_steps"
        )
    if member.virtual_workers is None and not placed.is_one_each:
        member = replace(member, virtual_workers=placed)
    return replace(context, member=member)
