"""Whether the jobs of a measurement fit this machine's memory. Pure but for one look at it."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from benchmarks.testbed.errors import TestbedError
from benchmarks.testbed.hooks import Hook, HookKind
from benchmarks.testbed.tables import megabytes
from benchmarks.testbed.worker_settings import DdpSettings, PoseidonSettings, TrainingSettings
from poseidon.observe.plan.shapes import elements

ELEMENT_BYTES = 4
PROCESS_BYTES = 200_000_000
"""Python and torch, and what a process needs beside the model."""
COPIES_DDP = 3
"""Weights, momentum, buckets."""
COPIES_HOOK = {HookKind.FP16: 0, HookKind.POWERSGD: 2, HookKind.POST_LOCAL: 1, HookKind.DILOCO: 3}
"""Further copies: PowerSGD has what it holds back and the gradient before compression,
post-local SGD the averaged weights, DiLoCo its anchors, their momentum and the changes.
"""
COMPUTED_BYTES = 300_000_000
"""Further bytes of a worker that computes: its activations."""
COPIES_POSEIDON = 5
"""Weights, the shards' values and momentum, gradients and values on their way."""
COPIES_CODEC = 2
"""Further ones with a lossy codec: what the workers and the shards hold back."""
COPIES_LOCAL_STEPS = 2
"""Further ones with local steps: the anchors and the outer gradients."""
SPARE = 0.9


def needed_bytes(
    training: TrainingSettings, how: DdpSettings | PoseidonSettings, workers: int
) -> int:
    """About what a job takes, all its processes together."""
    model = elements(training.layers) * ELEMENT_BYTES
    # the constant gradient
    largest = max(layer.elements for layer in training.layers) * ELEMENT_BYTES
    worker = largest + PROCESS_BYTES + (COMPUTED_BYTES if training.computed else 0)
    if isinstance(how, DdpSettings):
        workers = 1 if how.alone else workers
        copies = COPIES_DDP + (COPIES_HOOK[Hook.parse(how.hook).kind] if how.hook else 0)
        return workers * (copies * model + worker)
    shards = (how.servers or workers) * how.shards
    copies = COPIES_POSEIDON + (COPIES_CODEC if how.compress else 0)
    copies += COPIES_LOCAL_STEPS if how.local_steps else 0
    return workers * (copies * model + worker) + shards * PROCESS_BYTES


def free_bytes() -> int:
    """Return the memory that jobs may take."""
    return int(psutil.virtual_memory().available * SPARE)


def check_memory(
    training: TrainingSettings, jobs: Sequence[DdpSettings | PoseidonSettings], workers: int
) -> None:
    """Whether jobs that live at the same time fit.

    Raises:
        TestbedError: they do not.
    """
    needed = sum(needed_bytes(training, how, workers) for how in jobs)
    available = free_bytes()
    if needed > available:
        raise TestbedError(
            f"{workers} workers on this net need about {megabytes(needed)} MB, and "
            f"{megabytes(available)} MB are "
            "free; take fewer hosts (--hosts) or a smaller net (--net)"
        )


def groups_that_fit(
    training: TrainingSettings,
    jobs: Sequence[DdpSettings | PoseidonSettings],
    workers: int,
    *,
    most_bytes: int,
) -> list[list[DdpSettings | PoseidonSettings]]:
    """Return jobs in groups, in their order, each of which fits; a job that does not fit has a
    group of its own.
    """
    groups: list[list[DdpSettings | PoseidonSettings]] = []
    used = 0
    for how in jobs:
        needed = needed_bytes(training, how, workers)
        if not groups or used + needed > most_bytes:
            groups.append([])
            used = 0
        groups[-1].append(how)
        used += needed
    return groups
