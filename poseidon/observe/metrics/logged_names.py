"""Names of what scripts log: which are learning rates and losses, and which curves share a panel."""

from __future__ import annotations

import re

RATES = ("learning_rate", "lr")
"""The names of a script's learning rate."""
_PART_OF_DATA = re.compile(r"^(train|training|val|valid|validation|eval|test)[_/.:-]")
_PERIOD = re.compile(r"_(step|epoch)$")


def is_loss(name: str) -> bool:
    """Return whether a name is of a loss."""
    return "loss" in name.lower()


def score(name: str) -> str:
    """Return what a value is, whatever data it is of: curves of one score share a panel.

    >>> score("val_accuracy"), score("train/accuracy_epoch"), score("grad_norm")
    ('accuracy', 'accuracy', 'grad_norm')
    """
    return _PERIOD.sub("", _PART_OF_DATA.sub("", name)) or name
