"""The training loop: Caffe's Solver::Solve and Step, on many workers at once.

Laws:

* All workers make the same decisions at the same iterations (test, display, snapshot, stop): every
  decision follows from the solver, the iteration and rank 0's requests, which name an iteration
  that all workers reach.
* A process computes an iteration for its virtual workers one after another. What it shows and saves
  belongs to them: means are taken over all virtual workers in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poseidon.caffe.solver.checkpoint import Checkpoint
from poseidon.caffe.solver.display import Display
from poseidon.caffe.solver.loss_scale import LossCheck, LossScale
from poseidon.caffe.solver.replica import Replica
from poseidon.caffe.solver.state import SolverState
from poseidon.caffe.solver.tester import Tester
from poseidon.engine.kept_state import KeptState, StateCopy
from poseidon.engine.leaf import MEMORY, StateSource
from poseidon.engine.loop_table import Act, Applies, LoopEvent
from poseidon.engine.memory import Regrouped, SolverMemory
from poseidon.engine.own_time import OwnTime
from poseidon.engine.session import TrainingSession
from poseidon.errors import JobError, SnapshotError
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.options import Scheme
from poseidon.exchange.replicas import ReplicaCheck
from poseidon.observe.metrics.glog_lines import GlogLine, done, solving, test_interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Settings of the loop that are not the solver's.

    Attributes:
        title: the net's name, for the log.
        on_progress: called after each iteration with its number; must be fast.
        local_steps: iterations of a round; 0: none.
        schemes: of each trained tensor, where a resumed run cannot find it out again.
        memory: takes memory snapshots; None: there are none.
    """

    title: str
    on_progress: Callable[[int], None]
    local_steps: int = 0
    schemes: Sequence[Scheme] = ()
    own_time: OwnTime | None = None
    memory: SolverMemory | None = None


class Trainer:
    """Trains the replica of one worker's process: reports events to a session, and does its acts.

    Args:
        exchange: `open` opens it; the trainer does not close it.
        display: `close` closes it.
    """

    def __init__(
        self,
        replica: Replica,
        exchange: Exchange,
        settings: LoopSettings,
        *,
        checkpoint: Checkpoint,
        testers: list[Tester],
        display: Display,
    ) -> None:
        self._replica = replica
        self._exchange = exchange
        self._settings = settings
        self._checkpoint = checkpoint
        self._testers = testers
        options = replica.member.options
        self._session = TrainingSession(
            Applies.SHARDS,
            passes=replica.settings.iter_size,
            turns=len(replica.nets),
            behind=bool(options.staleness or settings.local_steps),
            alone=replica.member.network.size == 1,
            rank=replica.rank,
        )
        self._state = SolverState(
            replica,
            exchange,
            self._session,
            local_steps=settings.local_steps,
            schemes=settings.schemes,
        )
        self._scale = None
        if replica.context.autocast is torch.float16:
            self._scale = LossScale(exchange, replica.trained)
            self._state.tree.add([self._scale.leaf()])
        self._display = display
        self._losses = {
            nets.number: LossCheck(
                nets.train,
                name=nets.name,
                stop=checkpoint.settings.stop_at_nan,
                deferred=replica.context.device.type != "cpu",
            )
            for nets in replica.nets
        }
        self._hooks = Hooks(
            [nets.train for nets in replica.nets],
            replica.trained,
            self._scale or exchange,
            passes=replica.settings.iter_size,
            wait_free=options.wait_free,
        )

    @property
    def iteration(self) -> int:
        """Iterations finished."""
        return self._session.iterations

    @property
    def loss(self) -> float | None:
        """The smoothed loss of the process's first virtual worker; None before the first one."""
        smoothed = next(iter(self._state.smoothed.values()))
        return smoothed.value if smoothed.losses else None

    def open(self, state: Mapping[str, Any] | None, path: Path | None = None) -> None:
        """Open the exchange with a state; None: a fresh start. All workers call it together.

        Args:
            state: of a file (`Checkpoint.restore`), the same on all workers; or what this worker
                has of the state in rank 0's memory.
            path: of the file; None: the state is from memory.
        """
        control, tree = self._exchange.control, self._state.tree
        if state is None:
            self._open()
        elif path is None:
            tree.write(state, MEMORY, self._open, gather=control.all_gather)
            self._replica.bring_fixed(control)
        else:
            source = StateSource(name=str(path), is_file=True, path=path)
            tree.write(state, source, self._open, self._state.say_resized)
        if state is not None:
            self._on(LoopEvent.LOAD)
        member = self._replica.member
        self._check = ReplicaCheck(
            member.options,
            state=self._state.replicated,
            collect=control.all_gather,
            rank=self._replica.rank,
            ranks=range(member.network.size),
            start=self.iteration,
        )
        for tester in self._testers:
            tester.skip_to(self._state.tests_done)

    def _open(self) -> None:
        self._exchange.open(self._state.histories())
        self._on(LoopEvent.OPEN)

    def _on(self, event: LoopEvent) -> None:
        for act in self._session.on(event):
            _ACTS[act](self)

    def run(self) -> None:
        """Train to the end, or until the job is asked to stop.

        Raises:
            Regrouped: the job is asked to continue with other workers.
        """
        self._display.log.write(solving(self._settings.title))
        try:
            self._end(stopped=self._loop())
            self._checkpoint.finish()
        except JobError:  # of a loss that is not finite: wait for the snapshot before it
            with suppress(SnapshotError):
                self._checkpoint.finish()
            raise

    def close(self) -> None:
        """Leave the nets and the snapshots' prefix. The exchange stays open."""
        self._checkpoint.leave()
        self._on(LoopEvent.CLOSE)
        self._display.close()

    def _loop(self) -> bool:
        control, solver = self._exchange.control, self._replica.settings
        memory = self._settings.memory
        if memory is not None and self.iteration < solver.max_iter:
            # the loss may have come before the snapshot on disk
            writes = memory.rewinds and solver.saves(self.iteration)
            if not (writes and self._snapshot(ends=False, last=False)):
                self._keep_in_memory(memory)
        while self.iteration < solver.max_iter:
            tests = solver.tests(self.iteration, first=solver.param.test_initialization)
            if tests and self._testers and not self._test():
                return True
            began_s = time.perf_counter()
            self._step(self.iteration)
            finished = self.iteration
            if memory is not None:
                memory.follow(time.perf_counter() - began_s)
            self._display.show(wait=False)  # also what precedes a snapshot that is complete now
            stops = control.is_asked_to_stop(finished)
            if control.is_asked_for_snapshot(finished) or solver.saves(finished):
                ends = finished >= solver.max_iter or stops
                self._snapshot(ends=ends, last=ends and not solver.saves_at_end(finished))
            if self._check.is_due(finished):  # not after a snapshot, which has compared
                self._compare_replicas()
            if stops:
                return True
            if memory is not None and finished < solver.max_iter:
                regroups = control.is_asked_to_regroup(finished)
                if regroups or memory.is_due(finished):
                    self._keep_in_memory(memory)
                if regroups:
                    self._display.show(wait=True)
                    memory.finish()
                    raise Regrouped
        return False

    def _keep_in_memory(self, memory: SolverMemory) -> None:
        for losses in self._losses.values():
            losses.check()

        def copy(note: bytes, before: KeptState | None) -> StateCopy:
            self._on(LoopEvent.SETTLE)
            control, state = self._exchange.control, self._exchange.state
            coming = self._state.tree.copy(control, keeps=memory.holds, note=note, before=before)
            if state.overtaken:
                coming.notes()
            return coming

        memory.begin(self.iteration, copy)

    def _step(self, iteration: int) -> None:
        solver, own_time = self._replica.settings, self._settings.own_time
        if solver.param.snapshot_diff:
            self._on(LoopEvent.SETTLE)
            self._checkpoint.before = self._replica.values()
        if own_time is not None:
            own_time.begin()
        self._on(LoopEvent.FORWARD)
        if solver.param.debug_info:
            self._replica.train.set_debug_info(solver.shows(iteration))
        outputs = self._compute_all()
        self._on(LoopEvent.STEP)
        if own_time is not None:
            own_time.end()
        if solver.shows(iteration):
            losses = (smoothed.value for smoothed in self._state.smoothed.values())
            self._display.collect(iteration, zip(losses, outputs, strict=True))
        self._settings.on_progress(self.iteration)

    def _compute_all(self) -> list[dict[str, Tensor]]:
        """Compute an iteration for all virtual workers of this process; return the outputs of their
        last passes.
        """
        scale = self._scale
        frozen = {} if scale is None else self._state.frozen.copies()
        while True:
            found = [self._compute(position) for position in range(len(self._replica.nets))]
            if scale is not None:
                self._hooks.send_rest()
            if scale is None or scale.agree(self.iteration):
                break
            self._state.frozen.restore(frozen)
            self._on(LoopEvent.REPEAT)
        for nets, (loss, _) in zip(self._replica.nets, found, strict=True):
            self._state.smoothed[nets.number].add(loss)
        return [outputs for _, outputs in found]

    def _compute(self, position: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute an iteration for one virtual worker; return its loss, and the outputs of its last
        pass.
        """
        nets = self._replica.nets[position]
        if position:
            self._on(LoopEvent.TURN)
        loss, outputs = self._replica.forward_backward(
            nets,
            self.iteration,
            self._end_pass,
            partial(self._losses[nets.number].add, self.iteration),
            *(() if self._scale is None else (self._scale.scaled,)),
        )
        if nets.number == 0:  # the values of statistics are virtual worker 0's until the next one
            self._state.frozen.advance(self.iteration)
        return loss, outputs

    def _end_pass(self) -> None:
        self._on(LoopEvent.BACKWARD)
        self._on(LoopEvent.PASS)
        self._hooks.next_pass()

    # The acts of the session.

    def _start(self) -> None:
        self._exchange.start(self.iteration, self._replica.settings.rate(self.iteration))
        self._hooks.start()

    def _finish(self) -> None:
        self._exchange.finish()
        self._session.end_iteration(self._exchange.finished)
        self._session.steps += 1

    def _test(self) -> bool:
        """Score all test nets.

        Return False if all workers interrupt it because the job was asked to stop.
        """
        self._on(LoopEvent.SETTLE)
        self._display.show(wait=True)
        for index, tester in enumerate(self._testers):
            if self._replica.rank == 0:
                self._display.log.begin_test(self.iteration, index)
            record = tester.run(self._state.tests_done, self.iteration, self._display.elapsed_s)
            if record is None:
                self._display.log.write(test_interrupted())
                return False
            self._display.show_test(record)
        self._state.tests_done += 1
        return True

    def _compare_replicas(self) -> None:
        self._on(LoopEvent.SETTLE)
        self._check.run(self.iteration)

    def _snapshot(self, *, ends: bool, last: bool) -> bool:
        """Write a snapshot; if training continues, from a memory snapshot, so that histories are
        collected once for both. Return whether a memory snapshot was taken.
        """
        for losses in self._losses.values():
            losses.check()
        self._compare_replicas()
        self._display.show(wait=True)
        known: Mapping[str, Any] = {}
        memory = self._settings.memory
        if ends or self._exchange.state.private:
            memory = None
        if memory is not None:
            self._keep_in_memory(memory)
            memory.finish()
            assert memory.newest is not None
            kept = memory.newest.content.shared
            known = {name: kept[name] for name in ("history",) if name in kept}
        self._on(LoopEvent.SETTLE)
        root = self._replica.rank == 0
        state = self._state.tree.read(self._exchange.control.all_gather, keeps=root, known=known)
        if root:
            self._checkpoint.save(state, self._display.log, last=last)
        return memory is not None

    def _end(self, *, stopped: bool) -> None:
        solver = self._replica.settings
        self._display.show(wait=True)
        self._on(LoopEvent.SETTLE)
        if solver.saves_at_end(self.iteration):
            self._snapshot(ends=True, last=True)
        if stopped:
            self._display.log.write(
                GlogLine(text="Optimization stopped early.", file="solver.cpp", line=224)
            )
            return
        if solver.shows(self.iteration):
            self._display.show_last(self.iteration, self._losses, self._state.smoothed)
        # Caffe: only where the last iteration is one to be tested
        if solver.test_interval and self._testers:
            self._test()
        self._display.log.write(done())


_ACTS: dict[Act, Callable[[Trainer], None]] = {
    Act.START: Trainer._start,
    Act.START_PRESENT: Trainer._start,
    Act.SEND: lambda trainer: trainer._hooks.finish(),
    Act.FINISH: Trainer._finish,
    Act.NEXT_TURN: lambda trainer: trainer._hooks.next_virtual_worker(),
    Act.REPEAT: lambda trainer: trainer._hooks.repeat(),
    Act.SETTLE: lambda trainer: trainer._exchange.settle(),
    Act.WAIT_LAST: lambda trainer: None,  # a run has settled, unless it ends by an error
    Act.CLOSE: lambda trainer: trainer._hooks.close(),
}
