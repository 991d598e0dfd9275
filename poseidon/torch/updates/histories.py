"""The histories of a rule as leaves of a group's state.

history   of the rule: all workers share it, or each virtual worker has one (staleness > 0, local
          steps)
outer     of the rule that applies the mean change of a round of local steps; all workers share it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from poseidon.engine.state_tree import Found, Leaf, LeafStage, Scope
from poseidon.errors import SnapshotError
from poseidon.exchange.base import History, Trained
from poseidon.torch.group_loop import GroupLoop
from ps_server.rules import history_count

Named = dict[str, list[Tensor]]


class Histories:
    """The histories of one group.

    Args:
        label: of the rule, for messages.
    """

    def __init__(self, loop: GroupLoop, label: str) -> None:
        self._loop = loop
        self._label = label
        self._read_outer: Named = {}
        self._loaded: list[History] = [()] * len(loop.update.plan.tensors)
        self._loaded_outer: Named = {}

    @property
    def _is_private(self) -> bool:
        """Whether the rule runs on each worker, on its own gradients."""
        return self._loop.exchange.state.private

    def leaves(self, *, live: Callable[[], Mapping[str, Tensor]]) -> list[Leaf]:
        """Return both leaves.

        Args:
            live: see `Leaf`.
        """
        history = Leaf(
            name="history",
            scope=Scope.VIRTUAL if self._is_private else Scope.SHARED,
            stage=LeafStage.UPDATE,
            read=self._read,
            write=self._write,
            resize=_mean,
            live=live,
        )
        return [history, self._leaf_of_outer(lambda: self._read_outer)]

    def only_outer(self) -> Leaf:
        """Return the leaf of the outer rule, where the inner one is an optimizer's."""
        return self._leaf_of_outer(lambda: self._split()[1])

    def _leaf_of_outer(self, read: Callable[[], Named]) -> Leaf:
        return Leaf(
            name="outer",
            scope=Scope.ROOT if self._is_private else Scope.SHARED,
            stage=LeafStage.UPDATE,
            read=read,
            write=self._write_outer,
            may_miss=True,
        )

    def _read(self) -> list[Named] | Named:
        own, self._read_outer = self._split()
        return own if self._is_private else own[0]

    def _split(self) -> tuple[list[Named], Named]:
        """Return the histories of the parameters by name, of each virtual worker of this process
        that has one of its own, and the outer rule's; none where there is no outer rule.
        """
        loop = self._loop
        workers = len(loop.turns.own) if self._is_private else 1
        own: list[Named] = [{} for _ in range(workers)]
        outer: Named = {}
        for trained, history in zip(
            loop.update.plan.tensors, loop.exchange.state.histories().values(), strict=True
        ):
            count = history_count(trained.rule.kind)
            arrays = [torch.tensor(array) for array in history]
            if not trained.statistics:
                for at, histories in enumerate(own):
                    histories[trained.name] = arrays[count * at : count * (at + 1)]
                outer[trained.name] = arrays[count * workers :]
        return own, outer if any(outer.values()) else {}

    def _write(self, found: Found) -> None:
        self._loaded = [self._history_of(t, found) for t in self._loop.update.plan.tensors]

    def _write_outer(self, found: Found) -> None:
        self._loaded_outer = found.shared or {}

    def _history_of(self, trained: Trained, found: Found) -> History:
        """Return a tensor's history in a state: the shared one, or the history of each virtual
        worker of this process, or for each the mean of all workers' histories.
        """
        shape, count = tuple(trained.tensor.shape), history_count(trained.rule.kind)
        own = self._loop.turns.own
        workers = len(own) if self._is_private else 1
        if trained.statistics:
            return [np.zeros(shape, np.float32)] * count * workers
        owners = found.each or [found.shared or {}]
        arrays = [owner.get(trained.name, []) for owner in owners]
        if any(len(a) != count or any(tuple(part.shape) != shape for part in a) for a in arrays):
            raise SnapshotError(
                f"the checkpoint has no history of '{trained.name}' that fits {self._label}"
            )
        if len(owners) > 1 and self._is_private:
            return [part.numpy() for number in own for part in arrays[number]]
        mean = [torch.stack(column).mean(0).numpy() for column in zip(*arrays, strict=True)]
        return mean * workers

    def loaded(self) -> list[History]:
        """Return what was loaded, as `Exchange.open` takes it."""
        outer = self._loaded_outer
        if not (outer and self._loop.built.local_steps):
            return self._loaded
        count = max(map(len, outer.values()), default=0)
        found: list[History] = []
        for trained, own in zip(self._loop.update.plan.tensors, self._loaded, strict=True):
            shape = trained.tensor.shape
            arrays = (
                [torch.zeros(shape)] * count if trained.statistics else outer.get(trained.name, [])
            )
            if len(arrays) != count or any(array.shape != shape for array in arrays):
                raise SnapshotError(
                    f"the checkpoint has no outer history that fits '{trained.name}'"
                )
            found.append([*own, *(array.numpy() for array in arrays)])
        return found


def _mean(found: Found) -> Named:
    of_workers: Sequence[Mapping[str, Sequence[Tensor]]] = found.each
    return {
        name: [
            torch.stack(column).mean(0)
            for column in zip(*(histories[name] for histories in of_workers), strict=True)
        ]
        for name in of_workers[0]
    }
