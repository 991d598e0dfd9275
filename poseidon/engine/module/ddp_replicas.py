"""Comparisons of the replicas of a DistributedDataParallel module.

Law: the workers compare while they reduce gradients, the one moment that all of them reach
together: a forward pass may be of one worker alone, an evaluation for instance. The weights then
are those after the optimizer's last step, before the next one.

Only weights that want a gradient are compared. DistributedDataParallel broadcasts buffers, or the
script has asked it not to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from poseidon.exchange.module_hooks import OfOneModule
from poseidon.exchange.options import ExchangeOptions
from poseidon.exchange.replicas import ReplicaCheck


def reduced_parameters(module: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients a module reduces, by their names."""
    return {
        name: parameter
        for name, parameter in module.module.named_parameters()
        if parameter.requires_grad and name not in module.parameters_to_ignore
    }


class DdpReplicas:
    """The replicas of one module, on all workers.

    Args:
        options: how often they are compared, and what a difference does.
        collect: returns the payloads of all workers by rank; all call it together.
    """

    def __init__(
        self,
        module: DistributedDataParallel,
        options: ExchangeOptions,
        *,
        collect: Callable[[bytes], Sequence[bytes]],
        rank: int,
    ) -> None:
        self._weights = reduced_parameters(module)
        self._has_run = False
        self._check = ReplicaCheck(
            options,
            state=self._own,
            collect=collect,
            rank=rank,
            remedy="Change weights, set rates and load the optimizer's state on all workers alike",
        )
        module.register_forward_pre_hook(OfOneModule(self._note_forward))

    def compare(self, steps: int) -> None:
        """Compare the replicas if it is time to. All workers call it together, once in each
        reduction of gradients.

        The first comparisons come after 1, 2, 4, 8, ... reductions: a script may let several of
        them pass before the optimizer's first step.

        Args:
            steps: finished reductions.

        Raises:
            JobError: they differ, and a difference ends the job.
        """
        early = steps > 0 and steps & (steps - 1) == 0
        if early or self._check.is_due(steps):
            self._check.run(steps)
        self._has_run = False

    def _note_forward(self, *_: object) -> None:
        self._has_run = True

    def _own(self) -> dict[str, Tensor]:
        """Return the weights to compare. A worker without a forward pass has ended its inputs
        (`Join`): its weights stay behind until the others have ended theirs.
        """
        return {n: p.data for n, p in self._weights.items()} if self._has_run else {}
