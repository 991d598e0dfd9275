"""One worker of Poseidon; started by a measurement.

    python -m benchmarks.testbed.poseidon_worker --settings FILE --rank 0

Law: the exchange is made by the function that jobs use, from the same plan, and joined to the net by the same hooks.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from benchmarks.testbed.control import obey
from benchmarks.testbed.emulated import EmulatedLinear, EmulatedNet
from benchmarks.testbed.worker_settings import (
    PoseidonSettings,
    TrainingSettings,
    WorkerSettings,
    read_settings,
)
from poseidon.exchange.base import Exchange, ExchangeSettings, Trained
from poseidon.exchange.build import Membership, build_exchange
from poseidon.exchange.cost import ExchangeKind
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.traced import TracedExchange
from poseidon.exchange.tracing_hooks import TracingHooks, named_layers
from ps_server import Rule
from ps_server.trace import NO_TRACE, Trace, Tracer


class PoseidonTraining:
    """One replica and its iteration.

    Args:
        net: the net.
        tensors: its parameters, as the exchange knows them.
        exchange: opened.
        settings: what to train, and how.
    """

    def __init__(
        self, net: EmulatedNet, tensors: list[Trained], exchange: Exchange, settings: WorkerSettings
    ) -> None:
        assert isinstance(settings.how, PoseidonSettings)
        self._net = net
        self._exchange = exchange
        self._rate = settings.training.rate
        self._iteration = 0
        self._hooks = Hooks(net, tensors, exchange, wait_free=settings.how.wait_free)

    def iterate(self) -> None:
        """Forward, backward; the update is the exchange's business."""
        self._exchange.start(self._iteration, self._rate)
        self._hooks.start()
        self._net().sum().backward()
        self._hooks.next_pass()
        self._hooks.finish()
        self._exchange.finish()
        self._iteration += 1

    def barrier(self) -> None:
        """Returns once all workers are there."""
        self._exchange.gathered(self._exchange.gather(b""))


def trained(net: nn.Module, training: TrainingSettings) -> list[Trained]:
    """The parameters of a net, with SGD's rule."""
    rule = Rule(momentum=training.momentum, decay=training.weight_decay)
    with_factors = {child.weight for child in net.modules() if isinstance(child, EmulatedLinear)}
    return [
        Trained(
            name=name,
            tensor=parameter,
            rule=rule,
            factor_rows=training.batch if parameter in with_factors else 0,
        )
        for name, parameter in net.named_parameters()
    ]


def membership(settings: WorkerSettings, rank: int) -> Membership:
    """What the exchange must know of the job."""
    assert isinstance(settings.how, PoseidonSettings)
    return Membership(
        rank=rank,
        workers=settings.workers,
        shards=len(settings.shards),
        kind=ExchangeKind(settings.how.exchange),
        host=settings.hosts[rank],
        token=settings.token.encode(),
        homes=settings.homes,
    )


@contextlib.contextmanager
def opened(settings: WorkerSettings, rank: int) -> Iterator[PoseidonTraining]:
    """A replica whose exchange is open."""
    training = settings.training
    net = EmulatedNet(training.layers, batch=training.batch, compute_s=training.compute_s)
    tensors = trained(net, training)
    with contextlib.closing(open_trace(settings, rank)) as trace:
        member = membership(settings, rank)
        built = build_exchange(tensors, ExchangeSettings(), member, lambda: settings.shards, trace=trace)
        exchange = built.exchange
        if trace is not NO_TRACE:
            exchange = TracedExchange(exchange, [tensor.name for tensor in tensors], trace)
            TracingHooks(named_layers(net), trace)
        try:
            exchange.open(None)
            if rank == 0:
                print("\n".join(built.plan.table()), flush=True)
            yield PoseidonTraining(net, tensors, exchange, settings)
        finally:
            exchange.close()


def open_trace(settings: WorkerSettings, rank: int) -> Tracer:
    """Where this worker's spans go."""
    assert isinstance(settings.how, PoseidonSettings)
    folder = settings.how.trace
    if folder is None:
        return NO_TRACE
    return Trace(folder / f"trace_worker_{rank}.json", process=f"worker {rank}", order=rank)


def main() -> None:
    """Join the others, and run the rounds that are asked for."""
    parser = argparse.ArgumentParser(description="A worker of Poseidon.")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    settings = read_settings(flags.settings)
    with opened(settings, flags.rank) as replica:
        obey(settings.control, flags.rank, replica.iterate, replica.barrier)


if __name__ == "__main__":
    main()
