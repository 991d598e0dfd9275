"""The exception of upgrades."""

from __future__ import annotations


class UpgradeError(ValueError):
    """A definition cannot be upgraded.

    The caller, who knows the file, translates this into a DefinitionError.

    Args:
        message: what is wrong and what was expected.
        layer: index of the layer in `layer` or `layers`; None if the error is about the whole
            definition.
    """

    def __init__(self, message: str, *, layer: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.layer = layer
