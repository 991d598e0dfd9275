"""What an exchange has beside its tensors, as leaves of a loop's state.

held_back  what lossy codecs have held back, of the virtual workers of a process at the first
history    of the rule: all workers share it, or each virtual worker has one (staleness > 0, local
           steps)
outer      of the rule that applies the mean change of a round of local steps; all workers share it

In a copy in memory (`StateTree.copy`) the inner histories of local steps are with `held_back`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.engine.leaf import Found, Leaf, LeafStage, Scope
from poseidon.errors import SnapshotError
from poseidon.exchange.base import Array, History, Trained
from poseidon.exchange.carrier import KeptHistories
from poseidon.exchange.exchange import Exchange
from ps_server.collection import Coming
from ps_server.rules import history_count

Named = dict[str, list[Tensor]]


class ExchangeLeaves:
    """The leaves of one exchange.

    Args:
        local_steps: of a round; 0: none.
        label: of the rule, for messages.
    """

    def __init__(
        self,
        tensors: Sequence[Trained],
        exchange: Exchange,
        *,
        own: range,
        local_steps: int = 0,
        label: str = "this rule",
    ) -> None:
        self._tensors = tensors
        self._exchange = exchange
        self._own = own
        self._local_steps = local_steps
        self._label = label
        self._read_outer: Named = {}
        self._loaded: list[History] | None = None
        self._loaded_outer: Named = {}
        self._kept: Coming[KeptHistories] | None = None

    @property
    def _is_private(self) -> bool:
        """Whether the rule runs on each worker, on its own gradients."""
        return self._exchange.state.private

    def held_back(self) -> Leaf:
        """Return what codecs hold back. What the shards hold back is with rank 0's."""
        return Leaf(
            name="held_back",
            scope=Scope.VIRTUAL,
            stage=LeafStage.EXCHANGE,
            read=lambda: self._at_first(
                {
                    name: torch.tensor(array, device="cpu")
                    for name, array in self._exchange.state.held_back().items()
                }
            ),
            write=self.hold_back,
            copy=lambda _: self._at_first(self._exchange.state.parts()),
        )

    def on_shards(self) -> Leaf:
        """Return what the shards hold back, for a copy in memory, where all who keep it have it."""
        return Leaf(
            name="held_back",
            scope=Scope.SHARED,
            stage=LeafStage.EXCHANGE,
            read=dict,
            copy=lambda _: Coming(lambda: True, self._held_on_shards),
        )

    def _at_first(self, held_back: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        return [dict(held_back), *({} for _ in self._own[1:])]

    def _held_on_shards(self) -> dict[str, Tensor]:
        assert self._kept is not None
        found, self._kept = self._kept.result().held_back, None
        return {name: _tensor(array) for name, array in found.items()}

    def hold_back(self, found: Found, more: Mapping[str, Array] | None = None) -> None:
        """Go on with what was held back: of this process, and of virtual workers that had another
        process.

        Args:
            more: takes precedence.
        """
        of_each = [_arrays(one or {}) for one in found.each]
        mine = {name: array for one in of_each for name, array in one.items()}
        mine |= of_each[found.own[0]] if len(of_each) > found.own[0] else {}
        mine |= {**_arrays(found.shared or {}), **(more or {})}
        for held_back in (*of_each, mine):  # all workers refuse what does not fit one of them
            self._exchange.state.hold_back(held_back)

    def histories(self) -> list[Leaf]:
        """Return the histories of the rule, and those of the outer rule."""
        history = Leaf(
            name="history",
            scope=Scope.VIRTUAL if self._is_private else Scope.SHARED,
            stage=LeafStage.UPDATE,
            read=self._read,
            write=self._write,
            resize=_mean,
            copy=(lambda _: [None] * len(self._own)) if self._is_private else self._copy,
        )
        return [history, self.outer(splits=False)]

    def outer(self, *, splits: bool) -> Leaf:
        """Return the leaf of the outer rule.

        Args:
            splits: the inner one is an optimizer's, so that no other leaf reads the histories.
        """
        return Leaf(
            name="outer",
            scope=Scope.ROOT if self._is_private else Scope.SHARED,
            stage=LeafStage.UPDATE,
            read=lambda: self._split()[1] if splits else self._read_outer,
            write=self._write_outer,
            copy=self._copy if self._is_private else None,
            may_miss=True,
        )

    def replicated(self) -> Mapping[str, Tensor]:
        """Return the live tensors that are equal on all replicas."""
        values = {trained.name: trained.tensor for trained in self._tensors}
        return {**values, **self._exchange.state.replicated()}

    def _copy(self, before: Named | None) -> Coming[Any]:
        """Begin to copy the histories that all replicas share."""
        old = {
            index: [tensor.numpy() for tensor in (before or {})[trained.name]]
            for index, trained in enumerate(self._tensors)
            if trained.name in (before or {})
        }
        self._kept = kept = self._exchange.state.keep(old)
        return Coming(kept.poll, lambda: self._named(kept.result().histories))

    def _named(self, histories: Mapping[int, History]) -> Named:
        return {
            trained.name: [_tensor(array) for array in histories[index]]
            for index, trained in enumerate(self._tensors)
            if not trained.statistics
        }

    def _read(self) -> list[Named] | Named:
        own, self._read_outer = self._split()
        return own if self._is_private else own[0]

    def _split(self) -> tuple[list[Named], Named]:
        """Return the histories of the parameters by name, of each virtual worker of this process
        that has one of its own, and the outer rule's; none where there is no outer rule.
        """
        workers = len(self._own) if self._is_private else 1
        own: list[Named] = [{} for _ in range(workers)]
        outer: Named = {}
        histories = self._exchange.state.histories().values()
        for trained, history in zip(self._tensors, histories, strict=True):
            count = history_count(trained.rule.kind)
            arrays = [torch.tensor(array, device="cpu") for array in history]
            if not trained.statistics:
                for at, named in enumerate(own):
                    named[trained.name] = arrays[count * at : count * (at + 1)]
                outer[trained.name] = arrays[count * workers :]
        return own, outer if any(outer.values()) else {}

    def _write(self, found: Found) -> None:
        if found.each or found.shared is not None:
            self._loaded = [self._history_of(trained, found) for trained in self._tensors]

    def _write_outer(self, found: Found) -> None:
        self._loaded_outer = found.shared or {}

    def _history_of(self, trained: Trained, found: Found) -> History:
        """Return a tensor's history in a state: the shared one, or the history of each virtual
        worker of this process, or for each the mean of all workers' histories.
        """
        shape, count = tuple(trained.tensor.shape), history_count(trained.rule.kind)
        workers = len(self._own) if self._is_private else 1
        if trained.statistics:
            return [np.zeros(shape, np.float32)] * count * workers
        owners = found.each or [found.shared]
        arrays = [owner.get(trained.name, []) for owner in owners]
        if any(len(a) != count or any(tuple(part.shape) != shape for part in a) for a in arrays):
            raise SnapshotError(
                f"{found.source.name} has no history of '{trained.name}' that fits {self._label}"
            )
        if len(owners) > 1 and self._is_private:
            return [part.numpy() for number in self._own for part in arrays[number]]
        return [part.numpy() for part in _mean_of(arrays)] * workers

    def loaded(self) -> list[History] | None:
        """Return what was loaded, as `Exchange.open` takes it; None: nothing."""
        outer = self._loaded_outer
        if not (outer and self._local_steps):
            return self._loaded
        count = max(map(len, outer.values()), default=0)
        found: list[History] = []
        loaded = self._loaded or [()] * len(self._tensors)
        for trained, own in zip(self._tensors, loaded, strict=True):
            shape = trained.tensor.shape
            zeros = [torch.zeros(shape, device="cpu")] * count
            arrays = zeros if trained.statistics else outer.get(trained.name, [])
            if len(arrays) != count or any(array.shape != shape for array in arrays):
                raise SnapshotError(
                    f"the checkpoint has no outer history that fits '{trained.name}'"
                )
            found.append([*own, *(array.numpy() for array in arrays)])
        return found


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _arrays(named: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.detach().reshape(-1).numpy() for name, tensor in named.items()}


def _mean(found: Found) -> Named | None:
    """Return what each of a different number of virtual workers begins with; None: the histories
    that the state has of all.
    """
    if found.shared is not None:
        return None
    of_workers: Sequence[Mapping[str, Sequence[Tensor]]] = found.each
    return {name: _mean_of([histories[name] for histories in of_workers]) for name in of_workers[0]}


def _mean_of(of_workers: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    if len(of_workers) == 1:
        return list(of_workers[0])
    return [torch.stack(column).mean(0) for column in zip(*of_workers, strict=True)]
