"""One worker of torch's DistributedDataParallel over gloo; started by a measurement.

    python -m benchmarks.testbed.ddp_worker --settings FILE --rank 0

Law: the code that a user of torch would write, without anything that slows it down: gradients are
views of the buckets, and the optimizer is torch's with its defaults.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.testbed.control import serve_rounds
from benchmarks.testbed.hooks import Hook, HookKind, attach, local_rounds
from benchmarks.testbed.replica import Replica
from benchmarks.testbed.worker_settings import DdpSettings, TrainingSettings, read_settings


class DdpTraining:
    """A replica and its iteration.

    Args:
        training: the training.
        how: the buckets and the hook; None: a single process without DDP.
        rank: of the worker.
    """

    def __init__(self, training: TrainingSettings, how: DdpSettings | None, rank: int = 0) -> None:
        self._replica = Replica(training, rank)
        self._net = self._replica.net
        self._after_step: Callable[[], None] = lambda: None
        hook = Hook.parse(how.hook) if how is not None and how.hook else None
        if hook is not None and hook.kind is HookKind.DILOCO:
            self._after_step = local_rounds(self._net, hook.number)
        elif how is not None:
            wrapped = DistributedDataParallel(
                self._net, gradient_as_bucket_view=True, bucket_cap_mb=how.bucket_mb
            )
            if hook is not None:
                self._after_step = attach(wrapped, hook)
            self._net = wrapped
        self._optimizer = None if training.emulated_update else self._replica.optimizer()
        self._replica.begin()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the weights."""
        return self._net.parameters()

    def iterate(self) -> float:
        """Run one iteration: forward, backward, update. Return the loss."""
        self._net.zero_grad()
        loss = self._replica.loss(self._net)
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()
        self._after_step()
        return loss.item()


def main() -> None:
    """Join the other workers, and run the requested rounds."""
    parser = argparse.ArgumentParser(description="A worker of torch's DistributedDataParallel.")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    flags = parser.parse_args()
    settings = read_settings(flags.settings)
    assert isinstance(settings.how, DdpSettings)
    steady = settings.training.steady
    torch.set_num_threads(1)
    if settings.workers == 1:
        alone = DdpTraining(settings.training, None)
        serve_rounds(settings.control, flags.rank, alone.iterate, lambda: None, steady=steady)
        return
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{settings.hosts[0]}:{settings.port}",
        rank=flags.rank,
        world_size=settings.workers,
    )
    training = DdpTraining(settings.training, settings.how, flags.rank)
    serve_rounds(settings.control, flags.rank, training.iterate, distributed.barrier, steady=steady)


if __name__ == "__main__":
    main()
