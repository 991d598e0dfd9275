"""Samplers without a group."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

from poseidon.torch.sampler import SampleOrder, SharedSampler, number_of_records


def sampler_of(
    dataset: Sized,
    *,
    own: range,
    workers: int,
    on_return: Callable[[int], None] = lambda _: None,
    **order: Any,
) -> SharedSampler:
    """Return the sampler of some of so many virtual workers."""
    records = number_of_records(dataset)
    whole = SampleOrder(records=records, workers=workers, **order)
    return SharedSampler(dataset, whole, own=own, on_return=on_return)
