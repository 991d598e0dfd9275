"""What a run of a solver shows: displayed iterations, tests, and the last loss.

Law: rank 0 shows the means over all virtual workers, once the numbers of all are here; training does
not wait for them. Other workers log the means over their own. With a quorum each worker shows its
own: a collection would let all workers wait for each other.

At the start a table of layers, shapes, parameters, and the shards of each.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from poseidon.base.text_files import aligned
from poseidon.caffe.net.net import Net
from poseidon.caffe.solver.averages import (
    SmoothedLoss,
    StatisticsOfTurns,
    as_outputs,
    join,
    output_sizes,
    pack,
    parts,
    split,
    total,
)
from poseidon.caffe.solver.loss_scale import LossCheck
from poseidon.caffe.solver.replica import Replica
from poseidon.exchange.job_control import JobControl
from poseidon.observe.metrics.glog_lines import GlogSink, last, number
from poseidon.observe.metrics.record import Sink, TestRecord, TrainRecord
from ps_server import Collection, StoreSpec
from ps_server.protocol.placement import place

TRAINED_S = 0.2
MOST_OUTPUTS = 100
"""The most outputs of a net that an event carries."""


class Display:
    """Shows a run.

    Args:
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

    def show_last(
        self,
        iteration: int,
        checks: Mapping[int, LossCheck],
        smoothed: Mapping[int, SmoothedLoss],
    ) -> None:
        """Show the mean of the last losses, with one more forward pass with the final weights, as
        Caffe does. All workers call it together.

        The pass changes statistics once more, and the test that follows reads them: all workers
        take the mean over the virtual workers, each of which has begun with the same values.

        Args:
            checks: of the losses of each virtual worker of this process.
            smoothed: the losses of each.
        """
        replica = self._replica
        statistics = StatisticsOfTurns(replica.train)
        found = []
        for nets in replica.nets:
            replica.seed_process("last", nets.number)
            outputs = nets.train()
            nets.train.drop_graph()
            checks[nets.number].add(iteration, nets.train.loss)
            checks[nets.number].check()
            smoothed[nets.number].add(nets.train.loss)
            found.append(pack(smoothed[nets.number].value, outputs))
            statistics.end_turn()
        payloads = self._control.all_gather(join(found))
        shown = total(parts(payloads)) / replica.virtual_workers.count
        statistics.take_mean(self._control.all_gather)
        record = self._record(iteration, self.elapsed_s, output_sizes(replica.train), shown)
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


class ScoreReporter:
    """Reports displayed iterations and the scores of each test to the launcher by events, which
    `send` takes. See `Sink`.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._next_s = 0.0
        self._unreported: TrainRecord | None = None

    def on_train(self, record: TrainRecord) -> None:
        """See `Sink`; reports at most every `TRAINED_S` seconds, and the last one."""
        self._unreported = record
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + TRAINED_S
            self._report()

    def _report(self) -> None:
        record, self._unreported = self._unreported, None
        if record is None:
            return
        outputs = [[output.name, output.value] for output in record.outputs[:MOST_OUTPUTS]]
        self._send(
            "trained",
            iteration=record.iteration,
            loss=record.loss,
            rate=record.rate,
            outputs=outputs,
        )

    def on_test(self, record: TestRecord) -> None:
        self._report()
        scores = [[output.name, number(output.value)] for output in record.outputs]
        self._send("tested", iteration=record.iteration, net=record.net, scores=scores)

    def close(self) -> None:
        self._report()


HEAD = ("layer", "type", "top", "parameters", "bytes", "on")


def net_table(net: Net, tables: Sequence[Sequence[str]], store: StoreSpec | None) -> list[str]:
    """Return the lines of the table.

    Args:
        tables: names of the tensors in each table of the store, by table id.
        store: None if each worker holds all values itself.
    """
    chunks = [] if store is None else place(store).chunks
    shards_by_name = {
        name: {chunk.shard for chunk in row}
        for names, row in zip(tables, chunks, strict=False)
        for name in names
    }
    shapes = net.blob_shapes
    rows = [HEAD]
    total = 0
    for (name, layer), step in zip(net.layer_modules, net.plan.steps, strict=True):
        mine = [info for info in net.parameters_info if info.layer == name]
        count = sum(prod(info.shape) for info in mine)
        total += count
        tops = [shapes[top] for top in layer.param.top if top in shapes]
        where = sorted({shard for info in mine for shard in shards_by_name.get(info.name, ())})
        rows.append(
            (
                name,
                layer.param.type,
                " ".join("x".join(map(str, shape)) or "1" for shape in tops[: len(step.tops)]),
                " ".join("x".join(map(str, info.shape)) for info in mine),
                f"{4 * count:,}" if count else "",
                _ranges(where) if store else ("here" if mine else ""),
            )
        )
    rows.append(("total", "", "", f"{total:,} values", f"{4 * total:,}", ""))
    return aligned(rows)


def _ranges(shards: Sequence[int]) -> str:
    """Return shards 0, 1, 2 and 5 as `shard 0-2,5`."""
    parts: list[list[int]] = []
    for shard in shards:
        if parts and parts[-1][-1] == shard - 1:
            parts[-1][1:] = [shard]
        else:
            parts.append([shard])
    text = ",".join("-".join(map(str, part)) for part in parts)
    return f"shard {text}" if text else ""
