"""The bytes of an iteration over each host's link in each direction, by Poseidon's formulas.

Law: pure, and independent of the measurement and of the exchange; only the scheme of each tensor
comes from the job's own plan. M model bytes, P workers, S hosts that only serve, K rows, a weight
of N x M:

    server, all work and serve     2 M (P - 1) / P        pushes to the other shards, and values to the other workers
    server, hosts that only serve  worker M, server M P / S
    factors                        K (P - 1) (M + N)
    DDP's ring                     2 M (P - 1) / P        with a hook M is what the hook sends (`hooks.py`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.testbed.hooks import Hook
from benchmarks.testbed.worker_settings import DdpSettings, PoseidonSettings, TrainingSettings
from poseidon.exchange.base import Trained
from poseidon.exchange.build import plan_exchange
from poseidon.exchange.cost import ExchangePlan
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, Scheme
from poseidon.observe.plan.shapes import LayerShape, elements
from ps_server.network import Network

ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """Bytes of an iteration in one direction; the other direction carries as many.

    Attributes:
        worker: over the link of a host with a worker.
        server: over the link of a host that only serves; 0 if there is none.
    """

    worker: float
    server: float = 0.0

    @property
    def busiest(self) -> float:
        """Bytes over the busiest link."""
        return max(self.worker, self.server)


def expected(
    training: TrainingSettings, how: DdpSettings | PoseidonSettings, workers: int
) -> LinkBytes:
    """Return the bytes that an iteration of a job must move.

    Args:
        training: the net and its batch.
        how: the system.
        workers: P.
    """
    if workers == 1 or (isinstance(how, DdpSettings) and how.alone):
        return LinkBytes(worker=0.0)
    if isinstance(how, DdpSettings) and how.hook:
        return LinkBytes(worker=ring(Hook.parse(how.hook).payload_bytes(training.layers), workers))
    if isinstance(how, DdpSettings) or how.exchange == ExchangeKind.ALLREDUCE.value:
        return LinkBytes(worker=ring(elements(training.layers) * ELEMENT_BYTES, workers))
    plan = plan_of(training, how, workers)
    if how.lossy:  # by the codecs' own sizes, which their tests check
        return LinkBytes(worker=plan.bytes / 2 / max(how.local_steps, 1))
    served, factors = 0, 0.0
    for choice in plan.choices:
        if choice.scheme is Scheme.FACTORS:
            factors += by_factors(choice.shape, training.batch, workers)
        else:
            served += _size(choice.shape) * ELEMENT_BYTES
    if how.servers:
        return LinkBytes(worker=served + factors, server=served * workers / how.servers)
    return LinkBytes(worker=ring(served, workers) + factors)


def ring(model_bytes: float, workers: int) -> float:
    """Return 2 M (P - 1) / P."""
    return 2 * model_bytes * (workers - 1) / workers


def by_factors(shape: Sequence[int], rows: int, workers: int) -> float:
    """Return K (P - 1) (M + N), in bytes."""
    return rows * (workers - 1) * sum(shape) * ELEMENT_BYTES


def plan_of(training: TrainingSettings, how: PoseidonSettings, workers: int) -> ExchangePlan:
    """Return the plan that the job will make."""
    places = range(how.servers or workers)
    homes = tuple(
        -1 - place if how.servers else place for place in places for _ in range(how.shards)
    )
    member = Membership(
        network=Network(size=workers, token=b"x"),
        shards=len(homes),
        homes=homes,
        options=how.options.without_local_steps,
    )
    # what many iterations have changed has no factors
    rows = 0 if how.local_steps else training.batch
    return plan_exchange(_tensors(training.layers, rows), member)


def _tensors(layers: Sequence[LayerShape], batch: int) -> list[Trained]:
    return [
        Trained(
            name=f"{layer.name}.{index}",
            tensor=nn.Parameter(torch.empty(shape, device="meta")),
            factor_rows=batch if layer.fully_connected and index == 0 else 0,
        )
        for layer in layers
        for index, shape in enumerate(layer.tensors)
    ]


def _size(shape: Sequence[int]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size
