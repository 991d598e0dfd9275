"""A test pass over all workers.

Law: batch n of all test batches ever made belongs to worker n mod W, so W workers score exactly the batches that one
process would, each once, and the next pass goes on where this one ended, as Caffe's does.
"""

from __future__ import annotations

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
    ) -> None:
        self._index = index
        self._iterations = test.iterations
        self._net = net
        self._exchange = exchange
        self._rank = rank
        self._workers = workers
        self._with_loss = with_loss

    def skip_to(self, passes: int) -> None:
        """Go on as if `passes` test passes had been made."""
        done = own_batches(self._rank, self._workers, 0, passes * self._iterations)
        for _, reader in self._net.readers():
            reader.skip_to(done)

    def run(self, passes: int, iteration: int, elapsed_s: float) -> TestRecord:
        """Make one test pass; every worker calls this at the same iteration.

        Args:
            passes: test passes made before.
            iteration: training iterations finished.
            elapsed_s: seconds since the start, for the record.
        """
        mine = own_batches(self._rank, self._workers, passes * self._iterations, self._iterations)
        sums: dict[str, Tensor] = {}
        loss = 0.0
        with torch.no_grad():
            for _ in range(mine):
                accumulate(sums, self._net())
                loss += float(self._net.loss) if self._with_loss else 0.0
        # A worker without a batch of its own has nothing to add.
        payload = pack(loss, sums) if mine else b""
        payloads = self._exchange.gathered(self._exchange.gather(payload))
        numbers = total([part for part in payloads if part]) / self._iterations
        return TestRecord(
            iteration=iteration,
            net=self._index,
            elapsed_s=elapsed_s,
            outputs=as_outputs(numbers[1:].tolist(), output_sizes(self._net), self._net.loss_weights),
            loss=float(numbers[0]) if self._with_loss else None,
        )
