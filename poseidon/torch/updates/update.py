"""How a module's parameters follow from gradients, as a group's loop sees it.

There are four ways (`updates`): a rule of the shards, a torch optimizer whose rules the shards apply,
a torch optimizer on the workers, and one on the workers with rounds of local steps. Each says

    what to plan      `plan`
    what to send      `rates`, `check_begin`, `check_backward`, `pass_ended`, `may_leave`, `sent`
    how to apply      `step`, `average_gradients` (`GroupUpdate`)
    which state       `leaves`, `reopen`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from poseidon.engine.leaf import Leaf
from poseidon.engine.loop_table import Applies
from poseidon.exchange.broadcast import Gather
from poseidon.exchange.hooks import Sender
from poseidon.exchange.options import OnDivergence
from poseidon.exchange.replicas import ReplicaCheck
from poseidon.torch.tensors import GroupPlan


class Update(Sender, ABC):
    """How a module's parameters follow from gradients.

    Attributes:
        applies: where gradients are applied.
        label: the name of the rule or optimizer, in messages and checkpoints.
    """

    plan: GroupPlan
    applies: Applies
    label: str

    def rates(self) -> tuple[float, ...]:
        """Return the rates of the iteration that begins; see `Trained.rate_index`."""
        return (0.0,)

    def check_begin(self) -> None:
        """Check what the script has done since the last step, before an iteration begins."""

    def check_backward(self) -> None:
        """Check that a backward pass may begin."""

    def pass_ended(self) -> None:
        """Note the end of a backward pass."""

    def check_read(self, index: int) -> None:
        """Check that the script may read a value that is on its way."""

    def forget(self) -> None:
        """Forget the passes of the turn."""

    @abstractmethod
    def leaves(self) -> Sequence[Leaf]:
        """Return the state of the rule or optimizer."""

    @abstractmethod
    def replicated(self) -> Mapping[str, Tensor]:
        """Return the live tensors that are equal on all replicas, by name."""

    def replica_check(self, gather: Gather) -> ReplicaCheck:
        """Return what compares the replicas; where the module is divided, those of a plane."""
        member = self.plan.context.member
        options, ranks = member.options, tuple(range(member.network.size))
        if self.plan.shards:  # a part of one plane cannot be mended by all workers together
            options = replace(options, on_divergence=OnDivergence.STOP)
            ranks = member.plane_ranks
        return ReplicaCheck(
            options,
            state=self.replicated,
            collect=lambda payload: [*map(gather(payload).__getitem__, ranks)],
            rank=member.network.rank,
            ranks=ranks,
        )

    @abstractmethod
    def reopen(self) -> None:
        """Open the exchange again with the module's tensors, and with the state that was loaded."""
