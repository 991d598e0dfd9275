"""One worker of torch's DistributedDataParallel over gloo; started by a measurement.

    python -m benchmarks.testbed.ddp_worker --settings FILE --rank 0

Law: what a user of torch would write, and nothing that slows it down: gradients are views of the buckets, the
optimizer is torch's own with its defaults.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from benchmarks.testbed.control import obey
from benchmarks.testbed.emulated import EmulatedNet
from benchmarks.testbed.worker_settings import WorkerSettings, read_settings


class DdpTraining:
    """One replica and its iteration.

    Args:
        settings: what to train.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        net = EmulatedNet(settings.layers, batch=settings.batch, compute_s=settings.compute_s)
        self._net = DistributedDataParallel(
            net, gradient_as_bucket_view=True, bucket_cap_mb=settings.bucket_mb
        )
        self._optimizer = torch.optim.SGD(
            net.parameters(),
            lr=settings.rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )

    def iterate(self) -> None:
        """Forward, backward, update."""
        self._optimizer.zero_grad()
        self._net().sum().backward()
        self._optimizer.step()


def main() -> None:
    """Join the others, and run the rounds that are asked for."""
    parser = argparse.ArgumentParser(description="A worker of torch's DistributedDataParallel.")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    flags = parser.parse_args()
    settings = read_settings(flags.settings)
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{settings.meeting_host}:{settings.meeting_port}",
        rank=flags.rank,
        world_size=settings.workers,
    )
    training = DdpTraining(settings)
    training.iterate()  # DDP orders its buckets after the first one
    obey(settings.control, flags.rank, training.iterate, distributed.barrier)


if __name__ == "__main__":
    main()
