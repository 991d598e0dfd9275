"""One worker of Poseidon; started by a measurement.

    python -m benchmarks.testbed.poseidon_worker --settings FILE --rank 0

Law: the module is trained with `poseidon.distribute`, as a user's. Only the worker's context comes
from the measurement instead of `poseidon run`.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

import poseidon
from benchmarks.testbed.control import serve_rounds
from benchmarks.testbed.replica import Replica
from benchmarks.testbed.worker_settings import (
    PoseidonSettings,
    TrainingSettings,
    WorkerSettings,
    read_settings,
)
from poseidon.engine.this_process import running_in
from poseidon.engine.worker_context import LoopJob, Observed, WorkerContext
from poseidon.errors import JobError
from poseidon.exchange.exchange import Built
from poseidon.exchange.membership import Membership
from poseidon.exchange.observer import ExchangeTrace, TracingHooks, named_layers
from poseidon.torch.group import Group
from ps_server.keys import read_keyring
from ps_server.network import Network
from ps_server.trace import NO_TRACE, Trace, Tracer

ADDRESSES_S = 120.0


class NoUpdate(torch.optim.Optimizer):
    """An optimizer whose work is part of the emulated compute time: it changes nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing."""


class PoseidonTraining:
    """A replica and its iteration.

    Args:
        training: the training.
        rank: of the worker.
        local_steps: whether the worker applies updates of its own.
    """

    def __init__(
        self, training: TrainingSettings, rank: int = 0, *, local_steps: bool = False
    ) -> None:
        self._replica = Replica(training, rank)
        self._net = self._replica.net
        optimizer: torch.optim.Optimizer | None = None
        if local_steps and training.emulated_update:
            optimizer = NoUpdate(self._net.parameters())
        elif self._replica.adamw:
            optimizer = self._replica.optimizer()
        self._group: Group
        if optimizer is not None:
            self._group = poseidon.distribute(self._net, optimizer, example=self._replica.example)
        else:
            rule = poseidon.SGD(
                lr=training.rate, momentum=training.momentum, weight_decay=training.weight_decay
            )
            self._group = poseidon.distribute(self._net, rule, example=self._replica.example)
        self._replica.begin()

    def iterate(self) -> float:
        """Run one iteration: forward and backward; the exchange, or an optimizer, applies the
        update. Return the loss.
        """
        loss = self._replica.loss(self._net)
        loss.backward()
        self._group.step()
        return loss.item()

    def barrier(self) -> None:
        """Return once all workers have called it."""
        self._group.mean(0.0)


def context(settings: WorkerSettings, rank: int, trace: Tracer) -> WorkerContext:
    """Return the context of a worker in its job."""
    assert isinstance(settings.how, PoseidonSettings)
    return WorkerContext(
        member=Membership(
            network=Network(
                rank=rank,
                size=settings.workers,
                host=settings.hosts[rank],
                token=settings.token.encode(),
                keys=(
                    read_keyring(settings.keys_file("worker", rank)) if settings.encrypted else None
                ),
            ),
            shards=len(settings.shards),
            homes=settings.homes,
            options=settings.how.options,
        ),
        connect=lambda own: (
            settings.shards
            or worker_addresses(settings.control.parent, own, rank, settings.workers)
        ),
        job=TestbedJob(trace, rank),
    )


class TestbedJob(LoopJob):
    """The job of a worker of the testbed, which may trace and logs its plan."""

    def __init__(self, trace: Tracer, rank: int) -> None:
        self.trace, self._rank = trace, rank

    def observe(self, built: Built, module: nn.Module) -> Observed:
        return Observed(built) if self.trace is NO_TRACE else Traced(built, module, self.trace)

    def opened(self, built: Built) -> None:
        if self._rank == 0:
            log_plan(built)


def worker_addresses(folder: Path, own: str, rank: int, workers: int) -> list[str]:
    """Return the addresses of all workers by rank, which go through files.

    Args:
        folder: the same on every worker.
        own: this worker's address.
        rank: of this worker.
        workers: their number.

    Raises:
        JobError: one did not come in time.
    """
    files = [folder / f"address_{number}" for number in range(workers)]
    files[rank].with_suffix(".new").write_text(own, encoding="ascii")
    files[rank].with_suffix(".new").rename(files[rank])
    deadline_s = time.monotonic() + ADDRESSES_S
    while missing := [number for number, file in enumerate(files) if not file.exists()]:
        if time.monotonic() >= deadline_s:
            raise JobError(
                f"worker {missing[0]} has not written its address to {folder} within "
                f"{ADDRESSES_S:g} s"
            )
        time.sleep(0.02)
    return [file.read_text(encoding="ascii") for file in files]


class Traced(Observed):
    """An exchange and a module in a trace.

    Args:
        built: the exchange.
        module: the module.
        trace: records the calls and layers.
    """

    def __init__(self, built: Built, module: nn.Module, trace: Tracer) -> None:
        super().__init__(built)
        names = [choice.name for choice in built.plan.choices]
        self.exchange.observe([ExchangeTrace(names, trace)])
        self._module = module
        self._trace = trace

    def watch(self) -> None:
        TracingHooks(named_layers(self._module), self._trace)


def log_plan(built: Built) -> None:
    """Log the plan to the job's output."""
    print("\n".join(built.plan.table()), flush=True)


def open_trace(settings: WorkerSettings, rank: int) -> Tracer:
    """Open the trace of this worker, if there is one."""
    assert isinstance(settings.how, PoseidonSettings)
    folder = settings.how.trace
    if folder is None:
        return NO_TRACE
    return Trace(folder / f"trace_worker_{rank}.json", process=f"worker {rank}", order=rank)


def main() -> None:
    """Join the other workers, and run the requested rounds."""
    parser = argparse.ArgumentParser(description="A worker of Poseidon.")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    settings = read_settings(flags.settings)
    with (
        contextlib.closing(open_trace(settings, flags.rank)) as trace,
        running_in(context(settings, flags.rank, trace)),
    ):
        assert isinstance(settings.how, PoseidonSettings)
        replica = PoseidonTraining(
            settings.training, flags.rank, local_steps=settings.how.local_steps > 0
        )
        serve_rounds(
            settings.control,
            flags.rank,
            replica.iterate,
            replica.barrier,
            steady=settings.training.steady,
        )


if __name__ == "__main__":
    main()
