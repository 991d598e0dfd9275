"""What can go wrong in an upgrade.

UpgradeError   the definition contradicts itself in a way that no upgrade can settle
"""

from __future__ import annotations


class UpgradeError(ValueError):
    """A definition that cannot be upgraded; whoever knows its file turns this into his own error.

    Args:
        message: what is wrong and what was expected.
        layer: index of the layer that it is about, in `layer` or `layers`; None for the whole.
    """

    def __init__(self, message: str, *, layer: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.layer = layer
