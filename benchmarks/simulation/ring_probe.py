"""One process of an all-reduce by gloo: prints its processor time.

python -m benchmarks.simulation.ring_probe tcp://10.0.0.1:9901 RANK HOSTS COUNT
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import distributed

BUCKET_BYTES = 25 * 2**20
"""The default bucket size of DDP."""


def main(argv: list[str]) -> None:
    """Take part in COUNT all-reduces, and print their processor time in seconds."""
    rendezvous, rank, hosts, count = argv[0], *map(int, argv[1:])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=hosts)
    bucket = torch.ones(BUCKET_BYTES // 4)
    distributed.all_reduce(bucket)
    began_s = time.process_time()
    for _ in range(count):
        distributed.all_reduce(bucket)
    used_s = time.process_time() - began_s
    distributed.barrier()
    distributed.destroy_process_group()
    print(json.dumps({"cpu_s": used_s}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
