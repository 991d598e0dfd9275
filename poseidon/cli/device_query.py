"""`poseidon device_query`: what torch says about this machine's GPUs, as `caffe device_query`
prints it.
"""

from __future__ import annotations

import argparse

import torch

from poseidon.cluster.job_plan import devices_from_flag
from poseidon.errors import JobError, UsageError

# Caffe's words and torch's names; not every torch knows all of them.
PROPERTIES = (
    ("Major revision number:         ", "major"),
    ("Minor revision number:         ", "minor"),
    ("Name:                          ", "name"),
    ("Total global memory:           ", "total_memory"),
    ("Total shared memory per block: ", "shared_memory_per_block"),
    ("Total registers per multiprocessor: ", "regs_per_multiprocessor"),
    ("Warp size:                     ", "warp_size"),
    ("Maximum threads per multiprocessor: ", "max_threads_per_multi_processor"),
    ("Clock rate:                    ", "clock_rate"),
    ("Number of multiprocessors:     ", "multi_processor_count"),
)


def run(arguments: argparse.Namespace) -> int:
    """Show them."""
    available = torch.cuda.device_count()
    if not available:
        raise JobError(
            f"there is no CUDA device on this machine that torch {torch.__version__} can use"
        )
    devices = devices_from_flag(arguments.gpu or "all", count_gpus=lambda: available)
    if devices == ("cpu",):
        raise UsageError("-gpu=cpu: the CPU is not a CUDA device; expected device numbers or all")
    print(f"Querying GPUs {arguments.gpu or 'all'}")
    for device in devices:
        print(f"Device id:                     {device.partition(':')[2]}")
        found = torch.cuda.get_device_properties(device)
        for words, name in PROPERTIES:
            if hasattr(found, name):
                print(f"{words}{getattr(found, name)}")
    return 0
