"""The histories of blobs that no rate moves: frozen ones (lr_mult 0) and statistics.

Law: Caffe applies its rule to them too, with the gradient 0 and the rate 0. Their values do not
change, but weight decay enters the histories of AdaGrad, RMSProp, AdaDelta and Adam. Nothing reads
these histories except a snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe.net.params import ParamInfo
from poseidon.caffe.solver.settings import SolverSettings
from poseidon.engine.state_tree import Leaf, Scope
from poseidon.exchange.base import History
from ps_server import Rule, RuleKind
from ps_server.rules import change, history_count

_LINEAR = (RuleKind.SGD, RuleKind.NESTEROV)
"""Rules whose history is a sum of changes, which a rate of 0 keeps at 0."""


def _decays_into_history(rule: Rule) -> bool:
    """Return whether weight decay changes the history of a blob whose gradient and rate are 0."""
    return rule.kind not in _LINEAR and rule.decay != 0


@dataclass(slots=True)
class _Entry:
    info: ParamInfo
    value: Tensor
    rule: Rule
    history: list[Tensor]


class FrozenHistories:
    """The histories of the blobs among `infos` that do not learn."""

    def __init__(self, infos: Sequence[ParamInfo], settings: SolverSettings) -> None:
        self._entries: dict[str, _Entry] = {}
        for info in infos:
            rule = settings.rule(0.0, info.decay_mult)
            if info.parameter.requires_grad or not _decays_into_history(rule):
                continue
            value = info.parameter.detach().view(-1)
            history = [torch.zeros_like(value) for _ in range(history_count(rule.kind))]
            self._entries[info.name] = _Entry(info, value, rule, history)

    def advance(self, iteration: int) -> None:
        """Apply the rule of one iteration, after its forward pass."""
        for entry in self._entries.values():
            change(
                entry.rule,
                torch.zeros_like(entry.value),
                entry.history,
                entry.value,
                rate=0.0,
                step=iteration,
            )

    def arrays(self) -> dict[str, History]:
        """Return copies of the histories by the name of the blob; blobs whose history is 0 are
        left out.
        """
        return {
            name: [
                tensor.cpu().numpy().reshape(entry.info.shape).copy() for tensor in entry.history
            ]
            for name, entry in self._entries.items()
        }

    def restore(self, histories: Mapping[str, History]) -> None:
        """Set the histories to a snapshot's."""
        for name, entry in self._entries.items():
            for tensor, array in zip(entry.history, histories[name], strict=True):
                tensor.copy_(torch.from_numpy(np.array(array, np.float32)).reshape(-1))

    def leaf(self) -> Leaf:
        """Return the histories as a leaf of a state. Virtual worker 0, which is rank 0's, has them."""
        return Leaf(
            name="frozen",
            scope=Scope.ROOT,
            read=lambda: {
                name: [torch.from_numpy(array) for array in history]
                for name, history in self.arrays().items()
            },
            write=lambda found: self.restore(
                {name: [tensor.numpy() for tensor in of] for name, of in found.shared.items()}
            ),
        )
