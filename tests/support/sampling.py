"""A sample of many combinations for every run; the others are marked as thorough."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest


def sample(combinations: Sequence[tuple[object, ...]], every: int) -> list[object]:
    """Return all combinations as parameters; without `--thorough` only every `every`-th runs.

    Args:
        combinations: what `itertools.product` gives; the last one varies fastest.
        every: without a common divisor with the number of any of the factors' values, so that all
            of them are met.
    """
    return [_parameters(values, number % every == 0) for number, values in enumerate(combinations)]


def sample_of_pairs(*dimensions: Sequence[object]) -> list[object]:
    """Return all combinations of one value each as parameters; without `--thorough` few of them
    run.

    Among those few every two values of different dimensions meet (pairwise cover).
    """
    combinations = list(itertools.product(*dimensions))
    candidates = random.Random(1).sample(combinations, len(combinations))
    chosen: list[Sequence[object]] = []
    missing = set().union(*map(_pairs, combinations))
    while missing:
        chosen.append(max(candidates, key=lambda values: len(missing & _pairs(values))))
        missing -= _pairs(chosen[-1])
    return [_parameters(values, values in chosen) for values in combinations]


def _pairs(values: Sequence[object]) -> set[object]:
    return set(itertools.combinations(enumerate(values), 2))


def _parameters(values: Sequence[object], always: bool) -> object:
    marks = () if always else pytest.mark.thorough
    return pytest.param(*values, marks=marks, id="-".join(map(_name, values)))


def _name(value: object) -> str:
    return str(getattr(value, "value", value))
