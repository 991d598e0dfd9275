"""Pieces: how the tensors are divided among the workers of a host.

    plane l     the workers with local rank l, one on each host
    piece       a tensor or a part of it, which belongs to one plane

The worker of a piece's plane is its owner on a host. A host has as many planes as the host with the
fewest workers: its other workers own nothing.

Law: pure and deterministic. All workers of a job cut alike.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import pairwise

from poseidon.exchange.base import Trained
from poseidon.exchange.server.placed import SMALL_TENSOR_ELEMENTS
from ps_server.codecs.base import SEGMENT_ELEMENTS

LEAST_ELEMENTS = 64 * 1024
"""Least elements of a part of a tensor: 256 KiB are worth a message."""
TOLD_ELEMENTS = 4 * LEAST_ELEMENTS
"""A worker tells the owners of its parts after so many elements: each message wakes them."""
MOST_PIECES = 100
"""Most pieces that a message names: its header is short."""


@dataclass(frozen=True, slots=True, order=True)
class FlatPiece:
    """Elements `start:stop` of a flat tensor.

    Attributes:
        index: of the tensor.
        is_whole: whether it is all of the tensor.
        plane: of its owners.
    """

    index: int
    start: int
    stop: int
    is_whole: bool
    plane: int

    @property
    def size(self) -> int:
        """Its elements."""
        return self.stop - self.start

    def name(self, tensor: str) -> str:
        """Return its name, from the tensor's."""
        return tensor if self.is_whole else f"{tensor}[{self.start}:{self.stop}]"

    def of(self, trained: Trained) -> Trained:
        """Return it as a tensor of its own, in the memory of its tensor."""
        if self.is_whole:
            return trained
        own = trained.tensor.detach().view(-1)[self.start : self.stop]
        if trained.looked_up:
            own = own.view(-1, *trained.tensor.shape[1:])
        return replace(trained, name=self.name(trained.name), tensor=own, factor_rows=0)


def cut(
    tensors: Sequence[Trained], planes: int, *, whole: Collection[int] = (), served: int = 0
) -> tuple[FlatPiece, ...]:
    """Divide tensors among planes by bytes. The pieces are in the order of the tensors.

    A large tensor is cut into as many pieces as there are planes, at multiples of what codecs and
    norms treat by itself, and between rows that are looked up. Small tensors stay together, since
    they share messages.

    Args:
        whole: tensors that are not cut: they travel as factors, or their codec needs a matrix.
        served: a tensor that belongs to plane 0: rank 0's requests travel with its pushes.
    """
    items: list[list[tuple[int, int, int]]] = []
    small: dict[object, list[tuple[int, int, int]]] = {}
    for index, trained in enumerate(tensors):
        size = trained.tensor.numel()
        keeps = index in whole or trained.statistics or trained.rule.matrix is not None
        parts = 1 if keeps else max(1, min(planes, size // LEAST_ELEMENTS))
        if parts == 1 and size <= SMALL_TENSOR_ELEMENTS:
            kind = trained.rule, trained.rate_index, trained.statistics
            group = small.get(kind)
            if group is None or _size(group) + size > LEAST_ELEMENTS:
                group = small[kind] = []
                items.append(group)
            group.append((index, 0, size))
            continue
        row = math.prod(trained.tensor.shape[1:]) if trained.looked_up else 1
        unit = math.lcm(SEGMENT_ELEMENTS, max(row, 1))
        bounds = [min(size, -(-size * part // parts // unit) * unit) for part in range(parts)]
        bounds.append(size)
        items += [[(index, start, stop)] for start, stop in pairwise(bounds) if stop > start]
    loads = [0] * planes
    found: list[FlatPiece] = []
    by_size = sorted(items, key=lambda item: (-_size(item), item[0]))
    by_size.sort(key=lambda item: all(index != served for index, _, _ in item))
    for number, item in enumerate(by_size):
        plane = 0 if number == 0 else loads.index(min(loads))
        loads[plane] += _size(item)
        for index, start, stop in item:
            is_whole = stop - start == tensors[index].tensor.numel()
            found.append(FlatPiece(index, start, stop, is_whole, plane))
    return tuple(sorted(found))


class HostPieces:
    """All pieces, as one worker of a host sees them.

    Args:
        tensors: of the exchange, the same on all workers.
        pieces: of the tensors, the same on all workers.
        rank: the local rank of this worker.
        by_factors: tensors that travel as factors, whole.
        encoded: places among this worker's pieces of those whose gradients a codec takes of each
            virtual worker by itself.

    Attributes:
        of: for each tensor the numbers of its pieces.
        values: the memory of each piece's elements, flat.
        own: the numbers of the pieces that this worker owns, in order.
        place: where each of these is among them.
        trained: these as tensors of their own.
    """

    def __init__(
        self,
        tensors: Sequence[Trained],
        pieces: Sequence[FlatPiece],
        rank: int,
        by_factors: AbstractSet[int] = frozenset(),
        encoded: AbstractSet[int] = frozenset(),
    ) -> None:
        self.tensors = tensors
        self.all = pieces
        self.by_factors, self.encoded = by_factors, encoded
        self.of: list[list[int]] = [[] for _ in tensors]
        for number, piece in enumerate(pieces):
            self.of[piece.index].append(number)
        flat = [trained.tensor.detach().view(-1) for trained in tensors]
        self.values = [flat[piece.index][piece.start : piece.stop] for piece in pieces]
        self.own = self.of_plane(rank)
        self.place = {number: place for place, number in enumerate(self.own)}
        self.trained = [pieces[number].of(self.tensor_of(number)) for number in self.own]

    def of_plane(self, plane: int) -> list[int]:
        """Return the numbers of a plane's pieces."""
        return [number for number, piece in enumerate(self.all) if piece.plane == plane]

    def tensor_of(self, number: int) -> Trained:
        """Return the tensor of a piece."""
        return self.tensors[self.all[number].index]


def _size(item: Sequence[tuple[int, int, int]]) -> int:
    return sum(stop - start for _, start, stop in item)
