"""A test pass over all workers.

Law: batch n of all test batches belongs to virtual worker n mod V, so V of them score exactly the
batches that one would, each once. The next pass continues where this one ended, as in Caffe.

Where the net changes statistics (a BatchNorm with use_global_stats: false), each virtual worker
begins a pass with the same values, and all end it with the mean over the virtual workers.

When rank 0 is asked to stop, all workers interrupt the pass within a batch. It then counts as not
begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe.net.net import Net
from poseidon.caffe.solver.averages import (
    StatisticsOfTurns,
    accumulate,
    as_outputs,
    join,
    output_sizes,
    pack,
    parts,
    total,
)
from poseidon.caffe.solver.detection import (
    Classes,
    DetectionTally,
    check_outputs,
    discard_results,
    save_results,
)
from poseidon.caffe.solver.replica import Replica
from poseidon.exchange.exchange import Exchange
from poseidon.observe.metrics.record import Output, TestRecord
from ps_server.rules import plain_sum


def own_batches(number: int, workers: int, start: int, count: int) -> int:
    """Return how many of batches start..start+count-1 belong to virtual worker `number`."""
    first = start + (number - start) % workers
    return max(0, -(-(start + count - first) // workers))


class _Verdict(Enum):
    """Rank 0's contribution to a collection that is open while a pass runs."""

    WAIT = b""  # the contribution of all others, at once
    GO_ON = b"go on"  # another collection follows
    SCORE = b"score"  # the pass has ended: a collection of the scores follows
    STOP = b"stop"  # the pass is interrupted


ROUND_S = 60.0
"""How long a collection stays open; waiting for one times out after ten minutes."""


class _Interruption:
    """Interrupts a pass on all workers: rank 0 decides, and every worker sees the same decision.

    The other workers contribute to a collection when it opens, and rank 0 when it
    has decided, so polling it costs nothing.
    """

    def __init__(self, exchange: Exchange, rank: int, stop_wanted: Callable[[], bool]) -> None:
        self._exchange = exchange
        self._decides = rank == 0
        self._stop_wanted = stop_wanted
        self._open()

    def _open(self) -> None:
        self._opened_s = time.monotonic()
        if not self._decides:
            self._decision = self._exchange.control.gather(_Verdict.WAIT.value)

    def stopped(self) -> bool:
        """Return True if the pass is to be interrupted before the next batch.

        Does not wait for other workers.
        """
        if self._decides:
            if self._stop_wanted():
                self._decide(_Verdict.STOP)
                return True
            if time.monotonic() - self._opened_s >= ROUND_S:
                self._decide(_Verdict.GO_ON)
            return False
        while (found := self._decision.poll()) is not None:
            if found[0] == _Verdict.GO_ON.value:
                self._open()
                continue
            return found[0] == _Verdict.STOP.value
        return False

    def over(self) -> bool:
        """Wait, after this worker's last batch, for the end of the pass.

        Return True if it was interrupted.
        """
        if self._decides:
            stopped = self._stop_wanted()
            self._decide(_Verdict.STOP if stopped else _Verdict.SCORE)
            return stopped
        while (found := self._decision.result())[0] == _Verdict.GO_ON.value:
            self._open()
        return found[0] == _Verdict.STOP.value

    def _decide(self, verdict: _Verdict) -> None:
        self._exchange.control.all_gather(verdict.value)
        self._open()


class _Scores:
    """The sums of one virtual worker's batches in a pass."""

    def __init__(self) -> None:
        self.batches = 0
        self.loss = 0.0
        self.outputs: dict[str, Tensor] = {}

    def pack(self) -> bytes:
        """Return the sums as bytes; nothing if there was no batch."""
        return pack(self.loss, self.outputs) if self.batches else b""


class Tester:
    """One test net, on one worker's process.

    Args:
        stop_wanted: returns True on rank 0 once the job was asked to stop.
        on_batch: called before each batch with the number of batches that this process has scored
            in this pass, and the number that it will score; must be fast.
    """

    def __init__(
        self,
        replica: Replica,
        index: int,
        exchange: Exchange,
        *,
        stop_wanted: Callable[[], bool] = lambda: False,
        on_batch: Callable[[int, int], None] = lambda done, count: None,
    ) -> None:
        self._replica = replica
        self._index = index
        self._iterations = replica.tests[index].iterations
        self._exchange = exchange
        self._workers = replica.virtual_workers.count
        self._with_loss = replica.solver.param.test_compute_loss
        self._ap_version = replica.settings.ap_version
        self._with_classes = replica.settings.param.show_per_class_result
        if self._ap_version is not None:
            check_outputs(self._net, index)
        self._stop_wanted = stop_wanted
        self._on_batch = on_batch

    @property
    def _nets(self) -> dict[int, Net]:
        return {nets.number: nets.tests[self._index] for nets in self._replica.nets}

    @property
    def _net(self) -> Net:
        return self._replica.nets[0].tests[self._index]

    def skip_to(self, passes: int) -> None:
        """Continue as if `passes` test passes had been made."""
        for nets in self._replica.nets:
            done = own_batches(nets.number, self._workers, 0, passes * self._iterations)
            for _, reader in nets.tests[self._index].readers():
                reader.skip_to(done)

    def run(self, passes: int, iteration: int, elapsed_s: float) -> TestRecord | None:
        """Make one test pass; every process calls this at the same iteration. Return the scores;
        None on all workers if the job was asked to stop before the pass had ended.

        Args:
            passes: test passes made before.
            elapsed_s: seconds since the start, for the record.
        """
        begin = passes * self._iterations
        numbers = range(begin, begin + self._iterations)
        nets = self._nets
        count = sum(own_batches(n, self._workers, begin, self._iterations) for n in nets)
        scores = {number: _Scores() for number in nets}
        tally, statistics = DetectionTally(), StatisticsOfTurns(self._net)
        for net in nets.values():
            discard_results(net)
        interruption = _Interruption(self._exchange, self._replica.rank, self._stop_wanted)
        done = 0
        with torch.no_grad():
            for owner, net in nets.items():
                for number in numbers[(owner - begin) % self._workers :: self._workers]:
                    self._on_batch(done, count)
                    if interruption.stopped():
                        statistics.restore()
                        return None
                    self._replica.seed_process("test", self._index, number)
                    self._score(net, scores[owner], tally, number - begin)
                    done += 1
                statistics.end_turn()
        if interruption.over():
            return None
        statistics.take_mean(self._exchange.control.all_gather)
        save_results(
            list(nets.values()),
            self._exchange.control.all_gather,
            begin=begin,
            count=self._iterations,
        )
        found = list(scores.values())
        classes: tuple[Classes, ...] = ()
        if self._ap_version is None:
            loss, outputs = self._means(found)
        else:
            loss, outputs, classes = self._precisions(found, tally, self._ap_version)
        return TestRecord(
            iteration=iteration,
            net=self._index,
            elapsed_s=elapsed_s,
            outputs=outputs,
            loss=loss if self._with_loss else None,
            classes=classes if self._with_classes else (),
        )

    def _score(self, net: Net, scores: _Scores, tally: DetectionTally, batch: int) -> None:
        """Score one batch."""
        outputs = net()
        scores.batches += 1
        if self._ap_version is None:
            accumulate(scores.outputs, outputs)
        else:
            tally.add(batch, outputs)
        scores.loss += float(net.loss) if self._with_loss else 0.0

    def _means(self, scores: Sequence[_Scores]) -> tuple[float, tuple[Output, ...]]:
        """Return the mean loss and outputs over all batches.

        A virtual worker without a batch has nothing to add.
        """
        payloads = self._exchange.control.all_gather(join(score.pack() for score in scores))
        numbers = total([part for part in parts(payloads) if part]) / self._iterations
        sizes, weights = output_sizes(self._net), self._net.plan.loss_weights
        return float(numbers[0]), as_outputs(numbers[1:].tolist(), sizes, weights)

    def _precisions(
        self, scores: Sequence[_Scores], tally: DetectionTally, version: str
    ) -> tuple[float, tuple[Output, ...], tuple[Classes, ...]]:
        """Return the mean loss, and the average precisions of the detections of all workers."""
        gather = self._exchange.control.all_gather
        payloads = gather(join(pack(score.loss, {}) for score in scores))
        losses = [float(np.frombuffer(part, "<f8")[0]) for part in parts(payloads)]
        tally.unpack(gather(tally.pack()))
        outputs, classes = tally.scores([name for name, _ in self._net.plan.outputs], version)
        return plain_sum(losses) / self._iterations, outputs, classes
