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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poseidon.caffe.solver.averages import (
    SmoothedLoss,
    as_outputs,
    output_sizes,
    pack,
    parts,
    total,
)
from poseidon.caffe.solver.checkpoint import Checkpoint, SolverProgress
from poseidon.caffe.solver.finite import LossCheck
from poseidon.caffe.solver.memory import MemorySnapshots
from poseidon.caffe.solver.replica import Replica, Values
from poseidon.caffe.solver.tester import Tester
from poseidon.engine.elastic import Regrouped
from poseidon.engine.own_time import OwnTime
from poseidon.errors import JobError, SnapshotError
from poseidon.exchange.base import History
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.job_control import join, split
from poseidon.exchange.options import ExchangeOptions
from poseidon.exchange.replicas import NO_CHECK, ReplicaCheck
from poseidon.observe.metrics.glog_lines import (
    GlogLine,
    GlogSink,
    done,
    last,
    solving,
    test_interrupted,
)
from poseidon.observe.metrics.record import Output, Sink, TrainRecord
from ps_server import Collection, SignalKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Displayed:
    """An iteration to be shown once the numbers of all virtual workers are here; `sizes` is how
    many each output has.
    """

    iteration: int
    elapsed_s: float
    rate: float
    sizes: dict[str, int]
    numbers: Collection


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Settings of the loop that are not the solver's.

    Attributes:
        prefix: of the snapshots' names.
        title: the net's name, for the log.
        on_progress: called after each iteration with its number and the smoothed loss of the
            process's first virtual worker; must be fast.
        exchange: the options of the exchange.
        stop_at_nan: a loss that is not finite ends training; otherwise it is a warning.
        from_memory: the job continues from a memory snapshot.
        began_s: the moment of the monotonic clock from which the log counts seconds; None: now.
    """

    prefix: Path
    title: str
    on_progress: Callable[[int, SmoothedLoss], None]
    exchange: ExchangeOptions = NO_CHECK
    stop_at_nan: bool = True
    from_memory: bool = False
    began_s: float | None = None


class Trainer:
    """Trains the replica of one worker's process.

    Args:
        exchange: open; the trainer does not close it.
        log: receives glog lines: on rank 0 the means over all virtual workers, on others those over
            their own, without tests.
        sinks: receive records too, on rank 0.
        own_time: measures iterations; None: nothing does.
        memory: takes memory snapshots; None: there are none.
    """

    def __init__(
        self,
        replica: Replica,
        exchange: Exchange,
        settings: LoopSettings,
        *,
        checkpoint: Checkpoint,
        testers: list[Tester],
        log: GlogSink,
        sinks: list[Sink],
        start: SolverProgress,
        own_time: OwnTime | None = None,
        memory: MemorySnapshots | None = None,
    ) -> None:
        self._replica = replica
        self._exchange = exchange
        self._solver = replica.settings
        self._rank = replica.context.rank
        self._workers = replica.virtual_workers.count
        self._settings = settings
        self._checkpoint = checkpoint
        self._testers = testers
        self._log = log
        self._sinks = [log, *sinks] if self._rank == 0 else [log]
        self._check = ReplicaCheck(
            settings.exchange if replica.context.workers > 1 else NO_CHECK,
            state=self._replicated,
            collect=exchange.control.all_gather,
            rank=self._rank,
            start=start.iteration,
        )
        quorum = settings.exchange.of_workers(replica.virtual_workers).quorum
        self._shows_own = quorum > 0  # a collection would let all workers wait for each other
        self._own_time = own_time
        self._memory = memory
        self._iteration = start.iteration
        self._tests_done = start.tests_done
        losses = start.losses or [()] * len(replica.nets)
        self._smoothed = {
            nets.number: SmoothedLoss(self._solver.average_loss, own)
            for nets, own in zip(replica.nets, losses, strict=True)
        }
        """By virtual worker, in order, as `_losses`."""
        self._losses = {
            nets.number: LossCheck(
                nets.train,
                name=nets.name,
                stop=settings.stop_at_nan,
                deferred=replica.context.device.type != "cpu",
            )
            for nets in replica.nets
        }
        self._before: Values = {}
        self._displayed: deque[Displayed] = deque()
        self._began_s = time.monotonic() if settings.began_s is None else settings.began_s
        self._hooks = Hooks(
            [nets.train for nets in replica.nets],
            replica.trained,
            exchange,
            passes=self._solver.iter_size,
            wait_free=settings.exchange.wait_free,
        )
        for tester in testers:
            tester.skip_to(start.tests_done, replica.nets)

    @property
    def iteration(self) -> int:
        """Iterations finished."""
        return self._iteration

    def run(self) -> None:
        """Train to the end, or until the job is asked to stop.

        Raises:
            Regrouped: the job is asked to continue with other workers.
        """
        self._log.write(solving(self._settings.title))
        try:
            self._end(stopped=self._loop())
            self._checkpoint.finish()
        except JobError:  # of a loss that is not finite: wait for the snapshot before it
            with suppress(SnapshotError):
                self._checkpoint.finish()
            raise
        finally:
            self._checkpoint.leave()
            self._hooks.close()
            for sink in self._sinks:
                sink.close()

    def _loop(self) -> bool:
        solver = self._solver
        if self._memory is not None and self._iteration < solver.max_iter:
            # the loss may have come before the snapshot on disk
            writes = self._settings.from_memory and self._snapshot_is_due()
            if not (writes and self._snapshot(ends=False, last=False)):
                self._keep_in_memory(self._memory)
        while self._iteration < solver.max_iter:
            if self._test_is_due(first=solver.test_initialization) and not self._test():
                return True
            began_s = time.perf_counter()
            self._step()
            if self._memory is not None:
                self._memory.follow(time.perf_counter() - began_s)
            self._show_displayed(wait=False)  # also what precedes a snapshot that is complete now
            requests = self._requests_now()
            if SignalKind.SNAPSHOT in requests or self._snapshot_is_due():
                ends = self._iteration >= solver.max_iter or SignalKind.STOP in requests
                self._snapshot(ends=ends, last=ends and not self._one_more_at_the_end())
            if self._check.is_due(self._iteration):  # not after a snapshot, which has compared
                self._compare_replicas()
            if SignalKind.STOP in requests:
                return True
            if self._memory is not None and self._iteration < solver.max_iter:
                regroups = SignalKind.REGROUP in requests
                if regroups or self._memory.is_due(self._iteration):
                    self._keep_in_memory(self._memory)
                if regroups:
                    self._show_displayed(wait=True)
                    self._memory.finish()
                    raise Regrouped
        return False

    def _keep_in_memory(self, memory: MemorySnapshots) -> None:
        for losses in self._losses.values():
            losses.check()
        averages = {number: smoothed.losses for number, smoothed in self._smoothed.items()}
        memory.begin(self._iteration, self._tests_done, averages)

    def _step(self) -> None:
        solver, exchange = self._solver, self._exchange
        rate = solver.rate(self._iteration)
        if solver.snapshot_diff:
            exchange.settle()
            self._before = self._replica.values()
        if self._own_time is not None:
            self._own_time.begin()
        exchange.start(self._iteration, rate)
        self._hooks.start()
        if solver.debug_info:
            self._replica.train.set_debug_info(
                bool(solver.display) and self._iteration % solver.display == 0
            )
        outputs = [self._compute(position) for position in range(len(self._replica.nets))]
        self._hooks.finish()
        exchange.finish()
        if self._own_time is not None:
            self._own_time.end()
        if solver.display and self._iteration % solver.display == 0:
            self._display(rate, outputs)
        self._iteration = exchange.finished
        self._settings.on_progress(self._iteration, next(iter(self._smoothed.values())))

    def _compute(self, position: int) -> dict[str, Tensor]:
        """Compute an iteration for one virtual worker; return the outputs of its last pass."""
        nets = self._replica.nets[position]
        if position:
            self._hooks.next_virtual_worker()
        loss, outputs = self._replica.forward_backward(
            nets,
            self._iteration,
            self._hooks.next_pass,
            partial(self._losses[nets.number].add, self._iteration),
        )
        if nets.number == 0:  # the values of statistics are virtual worker 0's until the next one
            self._checkpoint.frozen.advance(self._iteration)
        self._smoothed[nets.number].add(loss)
        return outputs

    def _requests_now(self) -> set[SignalKind]:
        return {
            signal.kind
            for signal in self._exchange.control.requests
            if signal.clock == self._iteration
        }

    def _test_is_due(self, *, first: bool) -> bool:
        interval = self._solver.test_interval
        due = bool(interval) and bool(self._testers) and self._iteration % interval == 0
        return due and (self._iteration > 0 or first)

    def _display(self, rate: float, outputs: Sequence[Mapping[str, Tensor]]) -> None:
        """Collect this iteration's numbers from all workers; they are shown when the last has
        come. With a quorum each worker shows its own.
        """
        own = zip(self._smoothed.values(), outputs, strict=True)
        payload = join(pack(smoothed.value, found) for smoothed, found in own)
        if self._shows_own:
            numbers = Collection(lambda: (payload,), lambda: (payload,))
        else:
            numbers = self._exchange.control.gather(payload)
        self._displayed.append(
            Displayed(
                iteration=self._iteration,
                elapsed_s=self._elapsed_s(),
                rate=rate,
                sizes=output_sizes(self._replica.train),
                numbers=numbers,
            )
        )

    def _show_displayed(self, *, wait: bool) -> None:
        while self._displayed:
            shown = self._displayed[0]
            payloads = shown.numbers.result() if wait else shown.numbers.poll()
            if payloads is None:
                return
            self._displayed.popleft()
            of_all = self._rank == 0 or self._shows_own
            shown_by = parts(payloads) if of_all else split(payloads[self._rank])
            numbers = total(shown_by) / len(shown_by)
            record = TrainRecord(
                iteration=shown.iteration,
                loss=float(numbers[0]),
                elapsed_s=shown.elapsed_s,
                outputs=self._outputs(numbers[1:], shown.sizes),
                rate=shown.rate,
            )
            for sink in self._sinks:
                sink.on_train(record)

    def _outputs(
        self, numbers: NDArray[np.float64], sizes: Mapping[str, int]
    ) -> tuple[Output, ...]:
        return as_outputs(numbers.tolist(), sizes, self._replica.train.loss_weights)

    def _test(self) -> bool:
        """Score all test nets.

        Return False if all workers interrupt it because the job was asked to stop.
        """
        self._exchange.settle()
        self._show_displayed(wait=True)
        for index, tester in enumerate(self._testers):
            if self._rank == 0:
                self._log.begin_test(self._iteration, index)
            record = tester.run(self._tests_done, self._iteration, self._elapsed_s())
            if record is None:
                self._log.write(test_interrupted())
                return False
            for sink in self._sinks if self._rank == 0 else ():
                sink.on_test(record)
        self._tests_done += 1
        return True

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _compare_replicas(self) -> None:
        self._exchange.settle()
        self._check.run(self._iteration)

    def _replicated(self) -> dict[str, Tensor]:
        values = {trained.name: trained.tensor for trained in self._replica.trained}
        return {**values, **self._exchange.state.replicated()}

    def _snapshot(self, *, ends: bool, last: bool) -> bool:
        """Write a snapshot; if training continues, from a memory snapshot, so that histories are
        collected once for both. Return whether a memory snapshot was taken.
        """
        for losses in self._losses.values():
            losses.check()
        self._compare_replicas()
        self._show_displayed(wait=True)
        progress = SolverProgress(
            iteration=self._iteration,
            tests_done=self._tests_done,
            losses=tuple(tuple(smoothed.losses) for smoothed in self._smoothed.values()),
        )
        histories: Sequence[History] | None = None
        if self._memory is not None and not (ends or self._exchange.state.private):
            self._keep_in_memory(self._memory)
            self._memory.finish()
            assert self._memory.newest is not None
            histories = self._memory.newest.histories
        before = (self._before or None) if self._solver.snapshot_diff else None
        self._checkpoint.save(
            self._settings.prefix,
            progress,
            self._exchange,
            self._log,
            histories=histories,
            before=before,
            last=last,
        )
        return histories is not None

    def _snapshot_is_due(self) -> bool:
        every = self._solver.snapshot
        return bool(every) and self._iteration % every == 0

    def _one_more_at_the_end(self) -> bool:
        """Return whether a run that ends after this iteration writes a snapshot of it then, as
        Caffe does.
        """
        return self._solver.snapshot_after_train and not self._snapshot_is_due()

    def _end(self, *, stopped: bool) -> None:
        solver = self._solver
        self._show_displayed(wait=True)
        self._exchange.settle()
        if self._one_more_at_the_end():
            self._snapshot(ends=True, last=True)
        if stopped:
            self._log.write(
                GlogLine(text="Optimization stopped early.", file="solver.cpp", line=224)
            )
            return
        if solver.display and self._iteration % solver.display == 0:
            self._last_loss()
        # Caffe: only where the last iteration is one to be tested
        if solver.test_interval and self._testers:
            self._test()
        self._log.write(done())

    def _last_loss(self) -> None:
        """Show the mean of the last losses, with one more forward pass with the final weights, as
        Caffe does.

        The pass changes statistics once more, and the test that follows reads them: all workers
        take the mean over the virtual workers, each of which has begun with the same values.
        """
        statistics = [t.tensor.detach().view(-1) for t in self._replica.trained if t.statistics]
        before = [tensor.clone() for tensor in statistics]
        found = []
        for nets in self._replica.nets:
            losses = self._losses[nets.number]
            for tensor, value in zip(statistics, before, strict=True):
                tensor.copy_(value)
            self._replica.seed_process("last", nets.number)
            outputs = nets.train()
            nets.train.drop_graph()
            loss = nets.train.loss
            losses.add(self._iteration, loss)
            losses.check()
            smoothed = self._smoothed[nets.number]
            smoothed.add(loss)
            others = {f"statistics {n}": tensor for n, tensor in enumerate(statistics)}
            found.append(pack(smoothed.value, {**outputs, **others}))
        payloads = self._exchange.control.all_gather(join(found))
        means = total(parts(payloads)) / self._workers
        sizes = [tensor.numel() for tensor in statistics]
        shown, of_statistics = np.split(means, [len(means) - sum(sizes)])
        for tensor, mean in zip(
            statistics, torch.from_numpy(of_statistics).split(sizes), strict=True
        ):
            tensor.copy_(mean)
        record = TrainRecord(
            iteration=self._iteration,
            loss=float(shown[0]),
            elapsed_s=self._elapsed_s(),
            outputs=self._outputs(shown[1:], output_sizes(self._replica.train)),
            rate=self._solver.rate(self._iteration),
        )
        self._log.write(*last(record))
        for sink in self._sinks:
            if sink is not self._log:
                sink.on_train(record)
