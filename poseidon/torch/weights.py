"""The weight of each virtual worker's batch in the mean gradient.

Its loss is the mean over its n_v records, so its gradient is g_v. The mean over all records is
sum(n_v g_v) / sum(n_v). The exchange takes the plain mean over V virtual workers, so each loss is
multiplied by n_v V / sum(n_v) before its backward pass. Then rules, optimizers, factors, codecs
and limits on the norm see gradients whose plain mean is the exact one.

Law: every worker knows whether the batches of a step have equally many records. A backward pass
with batches that have not, and a loss that was not weighed, is refused on all workers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import TypeVar

from torch import Tensor

from poseidon.errors import UsageError
from poseidon.exchange.broadcast import Gather

Batch = TypeVar("Batch")
_NUMBER = struct.Struct("<d")


class BatchWeights:
    """The records of the present batch of each virtual worker.

    Attributes:
        counts: whether this worker's batch has records of its own: it does not only fill a turn.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._known: tuple[int, int] | None = None  # records of this batch, and of all
        self.counts = True
        self._must_weigh = False
        self._weighed: list[float] = []  # what the losses of this step were multiplied by

    @property
    def is_left_out(self) -> bool:
        """Whether this worker's losses of the present step have no weight in the mean."""
        return bool(self._weighed) and not any(self._weighed)

    @property
    def records(self) -> int | None:
        """The records of this worker's batch, where `Group.loader` has said it."""
        return None if self._known is None else self._known[0]

    def end_step(self) -> None:
        self._weighed.clear()

    def note(self, records: Sequence[int], virtual_worker: int) -> None:
        """Note the numbers of records of all next batches, known to every worker.

        Args:
            records: by virtual worker; 0: the batch only fills the place. Empty: there is no batch.
            virtual_worker: whose batch is next here.
        """
        if not records:
            self._known, self.counts, self._must_weigh = None, True, False
            return
        self._known = records[virtual_worker], sum(records)
        self.counts = records[virtual_worker] > 0
        self._must_weigh = len(set(records)) > 1

    def weigh(
        self, loss: Tensor, records: float | None, of: float | None, gather: Gather
    ) -> Tensor:
        """Return a loss times n V / sum(n); see `Group.weigh`.

        Raises:
            UsageError: a number is out of range, or needed.
        """
        self._must_weigh = False
        if records is None:
            if self._known is None:
                raise UsageError(
                    "weigh() needs the number of records of this batch; call weigh(loss, len(x)), "
                    "or use batches of group.loader()"
                )
            known, of_all = self._known
            factor = known * self._workers / of_all
        else:
            for number in (records, of):
                if number is not None and not (math.isfinite(number) and number >= 0):
                    raise UsageError(f"weigh() was given {number} records; expected 0 or more")
            own = records if self.counts else 0
            mine = _NUMBER.pack(own if of is None or not self.counts else of)
            total = math.fsum(_NUMBER.unpack(part)[0] for part in gather(mine))
            factor = own * self._workers / total if total else 0.0
        self._weighed.append(factor)
        return loss if factor == 1.0 else loss * factor

    def check_weighed(self) -> None:
        """Raise UsageError if the loss of a backward pass was not weighed, where it must be."""
        if self._must_weigh:
            raise UsageError(
                "the workers' batches of this step have different numbers of records, so their "
                "plain mean is not the mean over the records; call group.weigh(loss).backward(), "
                "or with your own loader group.weigh(loss, len(x)).backward()"
            )

    def until_all_end(self, batches: Iterable[Batch], gather: Gather, rank: int) -> Iterator[Batch]:
        """Yield this worker's batches, and after their end the last one again until all workers
        have reached theirs.

        Raises:
            UsageError: a worker has no batch, and another has.
        """
        own, last = iter(batches), None
        for step in count():
            self._known = None
            found = next(own, None)  # a loader of the group notes the sizes of its batches here
            fillers = [part == b"" for part in gather(b"" if found is None else b"\1")]
            if all(fillers):
                self.note((), rank)
                return
            if step == 0 and any(fillers):
                raise UsageError(
                    f"worker {fillers.index(True)} has no batch, but worker {fillers.index(False)} "
                    "has; every worker needs at least one"
                )
            last = last if found is None else found
            if any(fillers) or self._known is None:
                self._known = None
                self.counts, self._must_weigh = not fillers[rank], any(fillers)
            assert last is not None
            yield last
