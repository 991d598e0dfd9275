"""The fragments of local steps: parts of the tensors, each exchanged at iterations of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def fragments_of(sizes: Sequence[int], count: int) -> list[range]:
    """Return the indices of the tensors of each fragment: consecutive ones, at least one, about
    equally many elements.

    Args:
        sizes: elements of each tensor.
        count: number of fragments; fewer if there are fewer tensors.
    """
    count = max(1, min(count, len(sizes)))
    ends = list(accumulate(sizes))
    starts = [0]
    for fragment in range(1, count):
        share = ends[-1] * fragment / count
        nearest = min(range(len(sizes)), key=lambda i: abs(ends[i] - share)) + 1
        starts.append(min(max(nearest, starts[-1] + 1), len(sizes) - (count - fragment)))
    return [
        range(start, stop) for start, stop in zip(starts, [*starts[1:], len(sizes)], strict=True)
    ]


class Fragment:
    """The state of one fragment.

    Args:
        indices: its tensors.
        offset: it sends after iterations of this number, modulo the steps of a round.
    """

    def __init__(self, indices: range, offset: int) -> None:
        self.indices = indices
        self.offset = offset
        self.steps = 0  # since the values were the anchors
        self.sent_at: int | None = None  # the iteration, while it travels
        self.exact = True  # whether what comes takes the place of the values
