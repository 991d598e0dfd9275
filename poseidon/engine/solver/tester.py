"""A test pass over all workers.

Law: batch n of all test batches ever made belongs to worker n mod W, so W workers score exactly the batches that one
process would, each once, and the next pass goes on where this one ended, as Caffe's does.

A pass that rank 0 is asked to stop is broken off by all workers within a batch; it then counts as not begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from poseidon.engine.averages import accumulate, as_outputs, output_sizes, pack, total
from poseidon.exchange.base import Exchange
from poseidon.metrics.record import TestRecord
from poseidon.net.net import Net
from poseidon.proto.definition import TestNet


def own_batches(rank: int, workers: int, start: int, count: int) -> int:
    """How many of batches start..start+count-1 belong to worker `rank`."""
    first = start + (rank - start) % workers
    return max(0, -(-(start + count - first) // workers))


class _Verdict(Enum):
    """What rank 0 contributes to a collection that is open while a pass runs."""

    WAIT = b""  # all others, at once
    GO_ON = b"go on"  # there will be another collection
    SCORE = b"score"  # the pass is over: the scores are collected next
    STOP = b"stop"  # the pass is broken off


ROUND_S = 60.0
"""How long a collection stays open: one that nobody ends counts as a hang after ten minutes."""


class _Interruption:
    """Whether a pass is broken off: rank 0 decides, and every worker sees the same decision.

    All others contribute to a collection when it opens, rank 0 when it has something to say, so looking at it costs them nothing.
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
        """Before a batch: whether to break off. Does not wait for others."""
        if self._decides:
            if self._stop_wanted():
                self._say(_Verdict.STOP)
                return True
            if time.monotonic() - self._opened_s >= ROUND_S:
                self._say(_Verdict.GO_ON)
            return False
        while (found := self._decision.poll()) is not None:
            if found[0] == _Verdict.GO_ON.value:
                self._open()
                continue
            return found[0] == _Verdict.STOP.value
        return False

    def over(self) -> bool:
        """After this worker's last batch: whether the pass was broken off after all."""
        if self._decides:
            stopped = self._stop_wanted()
            self._say(_Verdict.STOP if stopped else _Verdict.SCORE)
            return stopped
        while (found := self._decision.result())[0] == _Verdict.GO_ON.value:
            self._open()
        return found[0] == _Verdict.STOP.value

    def _say(self, verdict: _Verdict) -> None:
        self._exchange.control.all_gather(verdict.value)
        self._open()


class Tester:
    """One test net on one worker.

    Args:
        index: number of the test net.
        test: its definition and iterations.
        net: the net, sharing the train net's weights.
        exchange: to meet the other workers.
        rank: this worker.
        workers: number of workers.
        with_loss: record the total loss too (test_compute_loss).
        stop_wanted: on rank 0, whether the job was asked to stop.
        on_batch: called with the batches of a pass that this worker has scored, and that it will score; cheap.
    """

    def __init__(
        self,
        index: int,
        test: TestNet,
        net: Net,
        exchange: Exchange,
        *,
        rank: int,
        workers: int,
        with_loss: bool,
        stop_wanted: Callable[[], bool] = lambda: False,
        on_batch: Callable[[int, int], None] = lambda done, count: None,
    ) -> None:
        self._index = index
        self._iterations = test.iterations
        self._net = net
        self._exchange = exchange
        self._rank = rank
        self._workers = workers
        self._with_loss = with_loss
        self._stop_wanted = stop_wanted
        self._on_batch = on_batch

    def skip_to(self, passes: int) -> None:
        """Go on as if `passes` test passes had been made."""
        done = own_batches(self._rank, self._workers, 0, passes * self._iterations)
        for _, reader in self._net.readers():
            reader.skip_to(done)

    def run(self, passes: int, iteration: int, elapsed_s: float) -> TestRecord | None:
        """Make one test pass; every worker calls this at the same iteration.

        Args:
            passes: test passes made before.
            iteration: training iterations finished.
            elapsed_s: seconds since the start, for the record.

        Returns:
            The scores; None on all workers where the job was asked to stop before the pass was over.
        """
        mine = own_batches(self._rank, self._workers, passes * self._iterations, self._iterations)
        sums: dict[str, Tensor] = {}
        loss = 0.0
        interruption = _Interruption(self._exchange, self._rank, self._stop_wanted)
        with torch.no_grad():
            for done in range(mine):
                self._on_batch(done, mine)
                if interruption.stopped():
                    return None
                accumulate(sums, self._net())
                loss += float(self._net.loss) if self._with_loss else 0.0
        if interruption.over():
            return None
        # A worker without a batch of its own has nothing to add.
        payload = pack(loss, sums) if mine else b""
        payloads = self._exchange.control.all_gather(payload)
        numbers = total([part for part in payloads if part]) / self._iterations
        return TestRecord(
            iteration=iteration,
            net=self._index,
            elapsed_s=elapsed_s,
            outputs=as_outputs(numbers[1:].tolist(), output_sizes(self._net), self._net.loss_weights),
            loss=float(numbers[0]) if self._with_loss else None,
        )
