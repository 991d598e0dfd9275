"""The state of an exchange whose pieces belong to several workers of a host.

A worker that needs what others own asks them, and the threads of their owners answer. Nothing that is asked for changes meanwhile: the worker that asks has not begun the
next iteration, and no piece changes without its contribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial

import msgpack
import numpy as np
from torch import Tensor

from poseidon.exchange.base import Array, History
from poseidon.exchange.carrier import (
    CarrierState,
    KeptHistories,
    UnitedState,
    in_order,
    merged,
)
from poseidon.exchange.device import device_of
from poseidon.exchange.host.group import HostGroup
from poseidon.exchange.host.pieces import HostPieces
from ps_server import RemoteProtocolError
from ps_server.collection import Coming
from ps_server.monitor import owned_thread
from ps_server.transport.base import Buffer

FIRST = -1
"""The number of what rank 0 begins with, which nobody asks for."""


class What(Enum):
    """A part of the state."""

    HELD_BACK = 0
    KEEP = 1


@dataclass(slots=True)
class Asked:
    """What is asked of other workers.

    Attributes:
        missing: the workers of whom something is still to come.
        unread: the workers that have not begun to copy it.
        histories: flat arrays by the number of their piece.
        held_back: what codecs hold back, by name.
    """

    missing: set[int]
    unread: set[int]
    histories: dict[int, list[Array]] = field(default_factory=dict)
    held_back: dict[str, Array] = field(default_factory=dict)


def send_state(
    group: HostGroup,
    to: int,
    number: int,
    histories: Mapping[int, History],
    held: Mapping[str, Array],
) -> None:
    """Send a worker what it has asked for.

    Args:
        histories: by the number of their piece.
    """
    for piece, arrays in histories.items():
        packed = [piece, [_bytes(array) for array in arrays]]
        group.send([to], "State", number, 0, payload=msgpack.packb(packed))
    last = {name: _bytes(array) for name, array in held.items()}
    group.send([to], "State", number, 1, payload=msgpack.packb(last))


class HostState(UnitedState):
    """The state of all tensors, on one worker of a host.

    Args:
        inner: of the pieces that this worker owns, by their place.
        private: whether the histories of any worker of the host are private. A worker that owns no
            tensor with one reads such tensors, too.
    """

    def __init__(
        self, pieces: HostPieces, inner: CarrierState, group: HostGroup, *, private: bool
    ) -> None:
        super().__init__([inner])
        self.private = private
        self._pieces = pieces
        self._inner = inner
        self._group = group
        self._named = {
            piece.name(pieces.tensors[piece.index].name): piece
            for piece in pieces.all
            if not piece.is_whole
        }
        self._number = 0
        self._asked = {FIRST: Asked({0}, set())}
        self._given: Mapping[str, Array] = {}
        group.peers.on("Kept", 1, self._note_kept)
        group.peers.on("State", 2, self._take)

    def answer(self, sender: int, number: int, what: What) -> None:
        """Answer a question of another worker. Called by the owner's thread."""
        if what is What.KEEP:
            send = partial(self._send_kept, sender, number, self._inner.keep({}))
            self._group.send([sender], "Kept", number)
            failed = self._group.peers.failing("the state did not come")
            owned_thread("kept-state", send, failed).start()
        else:
            send_state(self._group, sender, number, {}, self._inner.held_back())

    def _send_kept(self, sender: int, number: int, coming: Coming[KeptHistories]) -> None:
        kept = coming.result()
        histories = {self._pieces.own[place]: own for place, own in kept.histories.items()}
        send_state(self._group, sender, number, histories, kept.held_back)

    def keep(self, into: Mapping[int, History]) -> Coming[KeptHistories]:
        asked, kept = self._ask(What.KEEP), self._inner.keep({})
        answers = self._answers(asked)
        self._group.monitor.wait_for(
            lambda: None if asked.unread else True,
            "the workers of this machine did not begin to copy their state",
        )

        @cache
        def whole() -> KeptHistories:
            (histories, held_back), others = kept.result(), answers.result()
            return KeptHistories(
                self._whole(histories, others.histories),
                self._with_whole_names(merged([held_back, others.held_back])),
            )

        def poll() -> KeptHistories | None:
            return None if kept.poll() is None or answers.poll() is None else whole()

        return Coming(poll, whole)

    def histories(self) -> Mapping[int, History]:
        return self.keep({}).result().histories

    def held_back(self) -> Mapping[str, Array]:
        asked, own = self._ask(What.HELD_BACK), self._inner.held_back()
        return self._with_whole_names(merged([own, self._answers(asked).result().held_back]))

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        self._given = held_back

    def bring(
        self,
        histories: Sequence[History] | None,
        memory: Sequence[Tensor],
    ) -> list[History] | None:
        """Bring the owners on the first host what rank 0 begins with: its values, histories that
        all replicas share, and what it was given of `held_back`. All workers of a host call it
        together. Return the histories of this worker's pieces.

        Args:
            memory: the values in the memory of the host.
        """
        group, pieces, values = self._group, self._pieces, self._pieces.values
        given, self._given = dict(self._given), {}
        found: list[History] | None
        found = None if histories is None else [self._part(histories, n) for n in pieces.own]
        if not group.network.rank_of(0) and not group.rank:
            for number, piece in enumerate(pieces.all):
                if piece.plane:
                    memory[number].copy_(values[number], non_blocking=True)
            for value in values[:1]:  # there is none where the exchange has no tensor
                device_of(value.device).event().synchronize()
            for rank in group.others:
                own = pieces.of_plane(rank)
                parts = {} if histories is None else {n: self._part(histories, n) for n in own}
                send_state(group, rank, FIRST, parts, self._of_pieces(own, given))
        elif not group.network.rank_of(0):
            first = self._answers(self._asked[FIRST]).result()
            self._asked[FIRST] = Asked({0}, set())
            for number in pieces.own:
                values[number].copy_(memory[number], non_blocking=True)
            if not self._inner.private:
                has_all = all(number in first.histories for number in pieces.own)
                found = [first.histories[n] for n in pieces.own] if has_all else None
            given = {**first.held_back, **given}
        self._inner.hold_back({**given, **self._of_pieces(pieces.own, given)})
        return found

    def _part(self, histories: Sequence[History], number: int) -> list[Array]:
        """Return a piece's part of the histories of the tensors, flat where it is a part."""
        piece = self._pieces.all[number]
        history = list(histories[piece.index])
        if piece.is_whole:
            return history
        return [array.reshape(-1)[piece.start : piece.stop] for array in history]

    def _of_pieces(self, numbers: Sequence[int], held: Mapping[str, Array]) -> dict[str, Array]:
        """Return what is held back of pieces, from what is held back of tensors."""
        found: dict[str, Array] = {}
        for number in numbers:
            piece, name = self._pieces.all[number], self._pieces.tensor_of(number).name
            for whole, array in held.items():
                if not whole.startswith(f"{name}, "):
                    continue
                part = array.reshape(-1)[piece.start : piece.stop]
                found[piece.name(name) + whole.removeprefix(name)] = part
        return found

    def _ask(self, what: What) -> Asked:
        group = self._group
        number, self._number = self._number, self._number + 1
        with group.monitor:
            asked = self._asked[number] = Asked(set(group.others), set(group.others))
        group.send(group.others, "Ask", number, what.value)
        return asked

    def _answers(self, asked: Asked) -> Coming[Asked]:
        """Return what was asked for."""

        def found() -> Asked | None:
            self._group.check_left(asked.missing.__contains__, answers=True)
            return None if asked.missing else asked

        what = "the state of this machine's workers did not come"
        return Coming.guarded(self._group.monitor, found, what)

    def _note_kept(self, sender: int, fields: Sequence[int], _: Buffer) -> None:
        if (asked := self._asked.get(fields[0])) is not None:
            asked.unread.discard(sender)

    def _take(self, sender: int, fields: Sequence[int], payload: Buffer) -> None:
        number, last = fields
        asked = self._asked.get(number)
        if asked is None or sender not in asked.missing:
            raise RemoteProtocolError("a state came that nobody has asked for")
        found = msgpack.unpackb(payload, strict_map_key=False)
        if last:
            asked.held_back |= {name: _array(array) for name, array in found.items()}
            asked.missing.discard(sender)
            if not asked.missing and number != FIRST:
                del self._asked[number]
        else:
            asked.histories[found[0]] = [_array(array) for array in found[1]]

    def _whole(
        self, own: Mapping[int, History], others: Mapping[int, list[Array]]
    ) -> Mapping[int, History]:
        """Return the histories of the tensors from those of their pieces."""
        of_pieces = {**others, **{self._pieces.own[place]: list(own[place]) for place in own}}
        found: dict[int, list[list[Array]]] = {}
        for number in sorted(of_pieces):
            found.setdefault(self._pieces.all[number].index, []).append(of_pieces[number])
        return in_order(
            {
                index: [
                    np.concatenate([array.reshape(-1) for array in arrays]).reshape(
                        tuple(self._pieces.tensors[index].tensor.shape)
                    )
                    for arrays in zip(*parts, strict=True)
                ]
                for index, parts in found.items()
            }
        )

    def _with_whole_names(self, held_back: Mapping[str, Array]) -> dict[str, Array]:
        """Return what codecs hold back by the names of tensors, from the names of pieces."""
        found: dict[str, Array] = {}
        for name, array in held_back.items():
            head, bracket, rest = name.partition("], ")
            piece = self._named.get(head + bracket[:1])
            if piece is None:
                found[name] = array
                continue
            tensor = self._pieces.tensors[piece.index]
            whole = found.setdefault(
                f"{tensor.name}, {rest}", np.zeros(tensor.tensor.numel(), np.float32)
            )
            whole[piece.start : piece.stop] = array.reshape(-1)
        return found


def _bytes(array: Array) -> bytes:
    return np.ascontiguousarray(array, np.float32).tobytes()


def _array(packed: bytes) -> Array:
    return np.frombuffer(bytearray(packed), np.float32)
