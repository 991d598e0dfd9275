"""What a run of a solver shows: displayed iterations, tests, and the last loss.

Law: rank 0 shows the means over all virtual workers, once the numbers of all are here; training does
not wait for them. Other workers log the means over their own. With a quorum each worker shows its
own: a collection would let all workers wait for each other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from poseidon.caffe.solver.averages import as_outputs, join, output_sizes, pack, parts, split, total
from poseidon.caffe.solver.replica import Replica
from poseidon.exchange.job_control import JobControl
from poseidon.observe.metrics.glog_lines import GlogSink, last
from poseidon.observe.metrics.record import Sink, TestRecord, TrainRecord
from ps_server import Collection


class Display:
    """Shows a run.

    Args:
        log: receives glog lines.
        sinks: receive records too, on rank 0.
        began_s: the moment of the monotonic clock from which the log counts seconds; None: now.
    """

    def __init__(
        self,
        replica: Replica,
        control: JobControl,
        log: GlogSink,
        sinks: Sequence[Sink],
        *,
        began_s: float | None = None,
    ) -> None:
        self.log = log
        self._replica = replica
        self._control = control
        self._is_root = replica.rank == 0
        self._sinks = [log, *sinks] if self._is_root else [log]
        self._began_s = time.monotonic() if began_s is None else began_s
        options = replica.member.options.of_workers(replica.virtual_workers)
        self._own = options.quorum > 0
        """Whether each worker shows its own numbers."""
        self._coming: deque[tuple[Callable[[NDArray[np.float64]], TrainRecord], Collection]] = (
            deque()
        )

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def collect(
        self, iteration: int, numbers: Iterable[tuple[float, Mapping[str, Tensor]]]
    ) -> None:
        """Collect an iteration's numbers from all workers.

        Args:
            numbers: the loss and the outputs of each virtual worker of this process.
        """
        payload = join(pack(loss, outputs) for loss, outputs in numbers)
        collection = Collection.here((payload,)) if self._own else self._control.gather(payload)
        sizes = output_sizes(self._replica.train)
        self._coming.append((partial(self._record, iteration, self.elapsed_s, sizes), collection))

    def show(self, *, wait: bool) -> None:
        """Show the iterations whose numbers are here.

        Args:
            wait: for the numbers of all.
        """
        while self._coming:
            record, collection = self._coming[0]
            payloads = collection.result() if wait else collection.poll()
            if payloads is None:
                return
            self._coming.popleft()
            of_all = self._is_root or self._own
            shown = parts(payloads) if of_all else split(payloads[self._replica.rank])
            numbers = total(shown) / len(shown)
            for sink in self._sinks:
                sink.on_train(record(numbers))

    def show_last(self, iteration: int, numbers: NDArray[np.float64]) -> None:
        """Show the loss and the outputs after the last iteration."""
        record = self._record(iteration, self.elapsed_s, output_sizes(self._replica.train), numbers)
        self.log.write(*last(record))
        for sink in self._sinks:
            if sink is not self.log:
                sink.on_train(record)

    def show_test(self, record: TestRecord) -> None:
        for sink in self._sinks if self._is_root else ():
            sink.on_test(record)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _record(
        self,
        iteration: int,
        elapsed_s: float,
        sizes: Mapping[str, int],
        numbers: NDArray[np.float64],
    ) -> TrainRecord:
        weights = self._replica.train.plan.loss_weights
        return TrainRecord(
            iteration=iteration,
            loss=float(numbers[0]),
            elapsed_s=elapsed_s,
            outputs=as_outputs(numbers[1:].tolist(), sizes, weights),
            rate=self._replica.settings.rate(iteration),
        )
