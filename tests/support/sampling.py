"""A sample of many combinations, for every run; the others are marked as thorough."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def sample(combinations: Sequence[tuple[object, ...]], every: int) -> list[object]:
    """All combinations as parameters; all but every `every`-th are left out unless `--thorough` is given.

    Args:
        combinations: what `itertools.product` gives; the last one varies fastest.
        every: without a common divisor with the number of any of the factors' values, so that all of them are met.
    """
    thorough = pytest.mark.thorough
    return [
        pytest.param(*values, marks=() if number % every == 0 else thorough, id="-".join(map(_name, values)))
        for number, values in enumerate(combinations)
    ]


def _name(value: object) -> str:
    return str(getattr(value, "value", value))
