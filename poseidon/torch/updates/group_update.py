"""How a module's parameters follow from gradients, as a group sees it."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from poseidon.errors import UsageError
from poseidon.torch.group_loop import GroupLoop
from poseidon.torch.updates.update import Update


class GroupUpdate(Update):
    """An update that ends the steps of a group's loop.

    Attributes:
        loop: from `attach` on.
    """

    loop: GroupLoop
    _handles: list[RemovableHandle]
    """Of hooks in optimizers, from `attach` on."""

    def attach(self, loop: GroupLoop) -> None:
        """Take part in a loop, whose exchange is open."""
        self.loop, self._handles = loop, []

    def close(self) -> None:
        """Leave the loop. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def name_of(self, parameter: Tensor) -> str:
        """Return the name of a parameter, for messages."""
        own = self.loop.exchanged.module.named_parameters()
        names = (f"'{name}'" for name, one in own if one is parameter)
        return next(names, "a parameter that is not the module's")

    @property
    @abstractmethod
    def lr(self) -> float:
        """The learning rate of the current or the next step."""

    @abstractmethod
    def set_lr(self, rate: float) -> None:
        """Set the learning rate.

        Raises:
            UsageError: within a step, or it belongs to an optimizer.
        """

    @abstractmethod
    def step(self, *, zero_grad: bool) -> bool:
        """End the step, or the turn of a virtual worker within it. See `Group.step`."""

    def average_gradients(self) -> bool:
        """See `Group.average_gradients`."""
        raise UsageError(
            f"average_gradients() cannot be used with {self.label}, because the shards consume the "
            "gradients; use a torch.optim optimizer on the workers"
        )
