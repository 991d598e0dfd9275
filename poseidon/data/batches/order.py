"""In which order the records of a list are read.

Law: pure. Stream record r is record r mod n of pass r div n; shuffled, each pass has a permutation of its own, drawn from the
seed and the pass, so that all workers of a job agree on it and a resumed job goes on with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from poseidon.data.batches.draws import draw

# Keeps these draws apart from those of crops, mirrors and skips, which are numbered from -1 up.
SALT = 1 << 62
Indices = npt.NDArray[np.int64]


def permutation(seed: int, number: int, count: int) -> Indices:
    """Return the numbers 0 .. count - 1 in the order of shuffle `number`."""
    # A seed of its own for each shuffle, so that no two draw the same keys at shifted places.
    own = int(draw(seed, np.array([SALT + number]), 1)[0, 0])
    keys = draw(seed ^ own << 32, np.arange(count, dtype=np.int64), 1)[:, 0]
    return np.argsort(keys, kind="stable")


class Order:
    """Stream records to records of a list of groups (of one group, if it is just a list).

    Args:
        sizes: records of each group, all >= 1; shuffled, the groups change places, and the records within each.
        shuffle: whether each pass has an order of its own.
        seed: of the job.
    """

    def __init__(self, sizes: Sequence[int], *, shuffle: bool, seed: int) -> None:
        self._sizes = list(sizes)
        self._starts = np.concatenate(([0], np.cumsum(self._sizes)))
        self._shuffle = shuffle
        self._seed = seed
        self._pass = -1
        self._order: Indices | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def record(self, stream: int) -> int:
        """Return the record that is stream record `stream` >= 0, counted over all groups."""
        number, within = divmod(stream, len(self))
        if not self._shuffle:
            return within
        if number != self._pass or self._order is None:
            self._order = self._of_pass(number)
            self._pass = number
        return int(self._order[within])

    def _of_pass(self, number: int) -> Indices:
        groups = permutation(self._seed, number, len(self._sizes))
        # A shuffle of its own for each group in each pass.
        return np.concatenate(
            [
                self._starts[group]
                + permutation(self._seed, 1 + number * len(self._sizes) + int(group), self._sizes[group])
                for group in groups
            ]
        )

    def group(self, record: int) -> tuple[int, int]:
        """Return the group that a record lies in, and its place there."""
        group = int(np.searchsorted(self._starts, record, side="right")) - 1
        return group, record - int(self._starts[group])
